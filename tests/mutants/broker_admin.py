"""Mutants of swarm/broker/admin."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="drained-though-needed",
        breaks="A worker is drained although the swarm cannot run the model without it.",
        target="swarm.broker.admin.operator:OperatorCommands._drain.on_answer",
        old="if isinstance(answer, Proposal):",
        new="if not problem:",
        caught_by="tests/unit/broker/admin/test_helm.py::test_who_is_needed_is_not_drained",
    ),
    Mutant(
        name="trace-not-asked-of-the-journal",
        breaks="The trace of a request that has left memory is not read from the journal.",
        target="swarm.broker.admin.queries:QueryHandler.query",
        old="if self._settings.has_journal and is_unknown:",
        new="if self._settings.has_journal and is_unknown and query.all:",
        caught_by="tests/unit/broker/reports/test_trace_after_restart.py::test_one_that_has_left_memory",
    ),
    Mutant(
        name="what-if-remembered-too-long",
        breaks="A plan preview is reused after workers have joined or left.",
        target="swarm.broker.admin.plan_preview:PlanPreviews.preview",
        old="key = (*self.wanted.cache_key, query.suppose)",
        new="key = (self._epoch, query.suppose)",
        caught_by="tests/unit/broker/admin/test_suppositions.py::test_who_asks_the_same_shares_the_answer",
    ),
)

"""Mutants of swarm/gateway/batches."""

from tests.mutants.mutant import Mutant

_RUNNER = "tests/unit/gateway/batches/test_runner.py"
_STORE = "tests/unit/gateway/batches/test_store.py"
_HTTP = "tests/unit/gateway/batches/test_http.py"

MUTANTS = (
    Mutant(
        name="batch-line-runs-under-a-new-id-after-a-restart",
        breaks="A gateway that starts again does not find the requests of its batch's lines at the broker.",
        target="swarm.gateway.batches.line_request:run_line",
        old='request_id = f"{batch.id}-{number}"',
        new="request_id = secrets.token_hex(16)",
        caught_by=f"{_HTTP}::test_a_restarted_gateway_submits_the_same_requests",
    ),
    Mutant(
        name="batch-line-with-the-priority-of-its-body",
        breaks="A line of a batch asks for a high priority and gets it.",
        target="swarm.gateway.batches.line_request:_scope",
        old='"owner": Caller(batch.tenant, LOWEST_PRIORITY, models=frozenset(batch.models)),',
        new='"owner": Caller(batch.tenant, models=frozenset(batch.models)),',
        caught_by=f"{_HTTP}::test_a_batch_is_answered_line_by_line",
    ),
    Mutant(
        name="batch-answer-counted-twice",
        breaks="An answer that is written again counts again.",
        target="swarm.gateway.batches.store:BatchStore.write",
        old="if done:",
        new="if done or True:",
        caught_by=f"{_STORE}::test_an_answer_is_stored_and_counted_once",
    ),
    Mutant(
        name="batch-answer-forgotten-after-a-failed-write",
        breaks="Answers are lost when the disk is full.",
        target="swarm.gateway.batches.runner:BatchRunner._apply",
        old="self._writing = None",
        new="self._on_written()",
        caught_by=f"{_RUNNER}::test_a_full_disk_stops_new_lines_and_loses_no_answer",
    ),
    Mutant(
        name="batch-place-free-before-the-answer-is-written",
        breaks="Answers pile up in memory while the disk is slow.",
        target="swarm.gateway.batches.runner:_Batch.num_places",
        old="return len(self.in_flight) + len(self.unwritten)",
        new="return len(self.in_flight)",
        caught_by=f"{_RUNNER}::test_a_line_keeps_its_place_until_its_answer_is_on_the_disk",
    ),
    Mutant(
        name="batch-file-of-another-owner",
        breaks="A key reads the files of another one.",
        target="swarm.gateway.batches.store:BatchStore.file",
        old='f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ? AND owner = ? AND is_whole", (file_id, owner)',
        new='f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ? AND is_whole", (file_id,)',
        caught_by=f"{_STORE}::test_an_owner_finds_only_its_own",
    ),
    Mutant(
        name="batch-owned-by-a-name",
        breaks="A new key with the name of a revoked one gets its files.",
        target="swarm.gateway.middleware.auth:_caller_of",
        old="return Caller(key.name, key.limits.max_priority, key.admin, frozenset(key.models), key.id)",
        new="return Caller(key.name, key.limits.max_priority, key.admin, frozenset(key.models), key.name)",
        caught_by=f"{_HTTP}::test_files_belong_to_a_key_and_not_to_its_name",
    ),
    Mutant(
        name="batch-vectors-with-another-seed",
        breaks="A line of embeddings is another request after a restart.",
        target="swarm.gateway.routes.vectors:_VectorJob.__init__",
        old="params = msgspec.structs.replace(params, seed=identity.seed)",
        new="pass",
        caught_by=f"{_HTTP}::test_a_restarted_gateway_submits_the_same_requests",
    ),
    Mutant(
        name="batch-cancellation-overtaken-by-the-end",
        breaks="A batch whose cancellation was acknowledged ends as completed.",
        target="swarm.gateway.batches.store:BatchStore.write",
        old="if record.status is BatchStatus.cancelling:",
        new="if False:",
        caught_by=f"{_STORE}::test_a_batch_that_ends_after_its_cancellation_is_cancelled",
    ),
    Mutant(
        name="batch-lines-after-its-time",
        breaks="A batch whose window has passed still starts lines.",
        target="swarm.gateway.batches.runner:BatchRunner._settle",
        old="if now >= batch.expires_at and not is_failing:",
        new="if False:",
        caught_by=f"{_RUNNER}::test_a_batch_that_expired_while_no_gateway_ran_starts_no_line",
    ),
    Mutant(
        name="batch-stopped-by-one-refusal",
        breaks="Lines for a model that is away hold up the others of their batch.",
        target="swarm.gateway.batches.runner:BatchRunner._retry",
        old="if batch.num_refused > len(batch.in_flight):",
        new="if True:",
        caught_by=f"{_RUNNER}::test_refused_lines_do_not_hold_up_the_others_of_their_batch",
    ),
    Mutant(
        name="batch-asks-on-after-a-refused-round",
        breaks="A swarm that takes nothing gets all lines of a batch at once.",
        target="swarm.gateway.batches.runner:BatchRunner._retry",
        old="if batch.num_refused > len(batch.in_flight):",
        new="if False:",
        caught_by=f"{_RUNNER}::test_a_batch_pauses_when_a_whole_round_is_refused",
    ),
    Mutant(
        name="batch-completed-without-its-refused-lines",
        breaks="A batch ends while refused lines wait to run again.",
        target="swarm.gateway.batches.runner:BatchRunner._settle",
        old="elif not batch.pending and not batch.refused:",
        new="elif not batch.pending:",
        caught_by=f"{_RUNNER}::test_refused_lines_do_not_hold_up_the_others_of_their_batch",
    ),
)

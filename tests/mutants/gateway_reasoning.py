"""Mutants of swarm/gateway/reasoning."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="thinking-half-a-mark-is-text",
        breaks="The parser of thinking streams text that may be the beginning of its end.",
        target="swarm.gateway.reasoning.marks:MarkParser._think",
        old="stop = len(self._held[: len(self._held) - num_open(self._held, self._closes)].rstrip(SPACE))",
        new="stop = len(self._held.rstrip(SPACE))",
        caught_by="tests/unit/gateway/reasoning/test_parsing.py::test_each_cut_of_the_text_gives_the_same",
    ),
    Mutant(
        name="thinking-not-counted-before-it-is-certain",
        breaks="Tokens of a mark that opens thinking are not counted as thinking.",
        target="swarm.gateway.completion.assembler:AnswerAssembler._split_thinking",
        old="choice.num_reasoning += choice.num_undecided",
        new="choice.num_reasoning += 1",
        caught_by="tests/unit/gateway/test_parts.py::test_thinking_is_counted_with_its_marks",
    ),
    Mutant(
        name="thinking-forced-on-a-model-without-a-switch",
        breaks="A grammar makes a model think that would answer at once.",
        target="swarm.gateway.completion.service:begin_thinking",
        old="if request.continues or not served.switches.is_thinking(template_variables(request, served)):",
        new="if request.continues:",
        caught_by="tests/unit/gateway/reasoning/test_templates.py::test_where_thinking_is_off_or_unknown_a_grammar_applies_at_once",
    ),
)

"""Mutants of swarm/client/text."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="http-half-a-character-given",
        breaks="A token with part of a character is streamed as a replacement character.",
        target="swarm.client.text.detokenize:Detokenizer.push",
        old="num_open = min(len(fresh) - len(fresh.rstrip(_BROKEN)), _MAX_OPEN)",
        new="num_open = 0",
        caught_by="tests/unit/client/text/test_detokenize.py::test_any_text_comes_back",
    ),
    Mutant(
        name="http-stop-string-over-tokens-let-through",
        breaks="The beginning of a stop string is streamed before the next token completes it.",
        target="swarm.client.text.detokenize:StopMatcher.push",
        old="return self._release(buffer, len(buffer) - self._num_open(buffer))",
        new="return self._release(buffer, len(buffer))",
        caught_by="tests/unit/client/text/test_detokenize.py::test_stops_do_not_depend_on_the_cuts",
    ),
    Mutant(
        name="text-compared-literals-spelled",
        breaks="Literals that a chat template compares messages with are rewritten, so that the comparison fails.",
        target="swarm.client.text.rewriting:_Rewriter.visit_Const",
        old="if self._num_comparing or not isinstance(node.value, str):",
        new="if not isinstance(node.value, str):",
        caught_by="tests/unit/client/text/test_spelling.py::test_templates_still_see_what_a_message_says",
    ),
    Mutant(
        name="text-loops-of-templates-uncounted",
        breaks="Loops of a chat template are not limited.",
        target="swarm.client.text.rewriting:_Rewriter.visit_For",
        old="node.body.insert(0, nodes.ExprStmt(_call(budget.tick, [], node.lineno), lineno=node.lineno))",
        new="",
        caught_by="tests/unit/client/text/test_budget.py::test_a_template_has_its_time",
    ),
    Mutant(
        name="text-any-word-between-brackets",
        breaks="Any bracketed word that a template writes becomes a control token, not only role names.",
        target="swarm.client.text.spelling:Spelling._is_joined",
        old='return text in self._numbers and _MIDDLE.sub("", text).lower() in ROLES',
        new="return text in self._numbers",
        caught_by="tests/unit/client/text/test_spelling.py::test_no_other_word_between_a_templates_brackets_is_one",
    ),
    Mutant(
        name="text-users-write-special-tokens",
        breaks="Special tokens in messages are parsed although the setting forbids it.",
        target="swarm.client.text.tokenizer:TextModel.encode_chat",
        old="if how.parse_special:",
        new="if how is not None:",
        caught_by="tests/unit/client/text/test_spelling.py::test_what_users_and_tools_write_is_text",
    ),
    Mutant(
        name="text-stripped-text-counts",
        breaks="The byte limit of a token is trusted although the tokenizer's normalizer drops text.",
        target="swarm.client.text.vocabulary:_shrinking",
        old="""
            else:
                return None
        """,
        new="",
        caught_by="tests/unit/client/text/test_vocabulary.py::test_where_text_can_vanish_nothing_is_proven",
    ),
)

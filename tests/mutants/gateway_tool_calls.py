"""Mutants of swarm/gateway/tool_calls."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="calls-results-behind-the-wrong-ones",
        breaks="Tool results follow the calls in the order of arrival instead of by call id.",
        target="swarm.gateway.tool_calls.template_adapter:_split_message",
        old='own = next((result for result in results if result.get("tool_call_id") == call.get("id")), None)',
        new="own = next((result for result in results ), None)",
        caught_by="tests/unit/gateway/tool_calls/test_chat.py::test_parallel_calls_are_parted_where_a_template_takes_one",
    ),
    Mutant(
        name="calls-a-token-written-as-its-letters",
        breaks="The grammar of a forced tool call spells a special token out as plain text.",
        target="swarm.gateway.tool_calls.grammars:mark_rule",
        old='return f"<[{added[text]}]>" if text in added else literal_rule(text)',
        new="return literal_rule(text)",
        caught_by="tests/unit/gateway/tool_calls/test_forced.py::test_marks_that_are_special_tokens_are_written_as_such",
    ),
    Mutant(
        name="calls-an-answer-taken-for-one",
        breaks="Bare JSON in an answer counts as a tool call whatever its name.",
        target="swarm.gateway.tool_calls.json_calls:_CallParser._set_name",
        old="""
            if self._bare and self._reader.find_tool(name) is None:
                raise NotACall
        """,
        new="",
        caught_by="tests/unit/gateway/tool_calls/test_reading.py::test_what_a_family_writes_is_read",
    ),
    Mutant(
        name="calls-half-a-mark-is-text",
        breaks="The parser of tool calls streams text that may be the beginning of a call's marker.",
        target="swarm.gateway.tool_calls.parser:BaseToolCallParser._find_mark",
        old="""
            if char in SPACE:
                if len(self._held) > MAX_SPACE:
                    self._release()
                continue
        """,
        new="""
            if char in SPACE:
                if len(self._held) > MAX_SPACE:
                    self._release()
                continue
            self._release()
        """,
        caught_by="tests/unit/gateway/tool_calls/test_reading.py::test_text_streams",
    ),
    Mutant(
        name="calls-a-second-where-one-is-allowed",
        breaks="A second tool call is returned where the request allows only one.",
        target="swarm.gateway.tool_calls.parser:BaseToolCallParser.end_call",
        old="self.done = not self._parallel",
        new="self.done = False",
        caught_by="tests/unit/gateway/tool_calls/test_reading.py::test_only_the_first_call_counts_where_one_is_allowed",
    ),
    Mutant(
        name="calls-strict-only-where-forced",
        breaks="The arguments of a strict tool that the model chooses to call do not follow its schema.",
        target="swarm.gateway.completion.service:add_tool_grammar",
        old="elif request.tools.have_strict and grammar is None:",
        new="elif False:",
        caught_by="tests/unit/gateway/tool_calls/test_forced.py::test_only_strict_tools_restrict_an_answer_that_may_call",
    ),
)

"""Grammars are checked in threads of their own, few at a time, and one that is slow holds no quick one up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from swarm.client.text import grammar as module
from swarm.client.text.grammar import GrammarChecker
from swarm.client.text.grammar_checks import GrammarCheckPool
from swarm.errors import InvalidRequest, Overloaded, Unavailable
from swarm.params import Grammar, SamplingParams
from tests.integration.fake_broker import EOS, tiny_tokenizer
from tests.unit.growing import Growing

PATIENCE_S = 30.0


def asked(text: str) -> SamplingParams:
    return SamplingParams(grammar=Grammar("regex", text))


class Compiler:
    """Compiles what begins with "slow" when it is told to, and everything else at once."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.made = Growing[str]()
        self._really = module.compile_grammar

    def __call__(self, grammar: Grammar, words: LLTokenizer) -> LLMatcher:
        self.made.append(grammar.text)
        assert not grammar.text.startswith("slow") or self.go_on.wait(PATIENCE_S)
        return self._really(grammar, words)

    async def is_at(self, text: str) -> None:
        await self.made.until(lambda: text in self.made)


@pytest.fixture
async def compiler(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Compiler]:
    compiler = Compiler()
    monkeypatch.setattr(module, "compile_grammar", compiler)
    yield compiler
    compiler.go_on.set()


@pytest.fixture
def checker() -> GrammarChecker:
    return GrammarChecker(tiny_tokenizer(), (EOS,))


async def test_a_slow_grammar_holds_nobody_up(compiler: Compiler, checker: GrammarChecker) -> None:
    """While it is compiled, others are, one after the other; and threads that do other work are all free."""
    checks = GrammarCheckPool()
    slow = asyncio.create_task(checks.check(checker, asked("slow")))
    await compiler.is_at("slow")
    for text in ("a", "b+", "[cd]"):
        await checks.check(checker, asked(text))
    with pytest.raises(InvalidRequest, match="unclosed group"):
        await checks.check(checker, asked("("))
    assert {thread.name for thread in threading.enumerate() if thread.name.startswith("asyncio")} == set()
    assert not slow.done()
    compiler.go_on.set()
    await slow
    checks.close()


async def test_what_is_known_needs_no_thread(compiler: Compiler, checker: GrammarChecker) -> None:
    """However many slow ones are being compiled; also that something is wrong."""
    checks = GrammarCheckPool()
    await checks.check(checker, asked("a"))
    with pytest.raises(InvalidRequest, match="unclosed group"):
        await checks.check(checker, asked("("))
    slow = [asyncio.create_task(checks.check(checker, asked(f"slow{n}"))) for n in range(3)]
    await compiler.is_at("slow1")
    await checks.check(checker, asked("a"))
    with pytest.raises(InvalidRequest, match="unclosed group"):
        await checks.check(checker, asked("("))
    assert "slow2" not in compiler.made
    compiler.go_on.set()
    await asyncio.gather(*slow)
    checks.close()


async def test_a_grammar_that_many_ask_for_is_compiled_once(compiler: Compiler, checker: GrammarChecker) -> None:
    """Also when one of them goes away meanwhile."""
    checks = GrammarCheckPool()
    tasks = [asyncio.create_task(checks.check(checker, asked("slow"))) for _ in range(20)]
    await compiler.is_at("slow")
    tasks[0].cancel()
    await asyncio.sleep(0)
    compiler.go_on.set()
    await asyncio.gather(*tasks[1:])
    assert compiler.made == ["slow"]
    assert tasks[0].cancelled()
    checks.close()


async def test_too_many_are_told_to_come_again(compiler: Compiler, checker: GrammarChecker) -> None:
    """Who would be one too many, and who has waited too long; later they are served."""
    checks = GrammarCheckPool(max_checks=2, wait_s=0.05)
    waiting = [asyncio.create_task(checks.check(checker, asked(f"slow{n}"))) for n in range(2)]
    await compiler.is_at("slow1")
    with pytest.raises(Overloaded, match="2 grammars are being compiled; try again later") as caught:
        await checks.check(checker, asked("a"))
    assert caught.value.retry_after_s > 0
    for task in waiting:
        with pytest.raises(Overloaded, match=r"could not be compiled within 0.05 s; try again later"):
            await task
    compiler.go_on.set()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await checks.check(checker, asked("a"))
            except Overloaded:
                await asyncio.sleep(0)  # until a thread has told the loop that it is through
            else:
                break
    checks.close()


async def test_closing_ends_the_wait(compiler: Compiler, checker: GrammarChecker) -> None:
    """Of those whose turn has not come."""
    checks = GrammarCheckPool()
    tasks = [asyncio.create_task(checks.check(checker, asked(f"slow{n}"))) for n in range(3)]
    await compiler.is_at("slow1")
    checks.close()
    with pytest.raises(Unavailable, match="this client is closed"):
        await tasks[2]
    compiler.go_on.set()
    await asyncio.gather(*tasks[:2])

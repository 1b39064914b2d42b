"""Mutants of swarm/stage/engine."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="program-bits-not-compared",
        breaks="A compiled program is used although its results differ from the modules'.",
        target="swarm.stage.engine.exercise:_compare",
        old="if result is None or by_modules is None or not torch.equal(result, by_modules):",
        new="if result is None or by_modules is None:",
        caught_by="tests/unit/stage/engine/test_programs.py::test_other_bits_turn_programs_off",
    ),
    Mutant(
        name="ends-inside-a-grammar",
        breaks="An answer may end before its grammar is complete.",
        target="swarm.stage.engine.grammars:Grammars._allowed",
        old="goes_on, may_end = bool(mask.any()), bool(ends) and matcher.is_accepting()",
        new="goes_on, may_end = bool(mask.any()), bool(ends)",
        caught_by="tests/unit/stage/engine/test_grammars.py::test_the_mask_is_what_brute_force_finds",
    ),
    Mutant(
        name="ends-wait-for-nothing",
        breaks="`min_tokens` forbids the end of an answer that has no other continuation.",
        target="swarm.stage.engine.grammars:Grammars._allowed",
        old="if may_end and not (goes_on and len(reader.tokens) < job.params.min_tokens):",
        new="if may_end and len(reader.tokens) >= job.params.min_tokens:",
        caught_by="tests/unit/stage/engine/test_grammars.py::test_min_tokens_waits_with_the_end_as_long_as_there_is_another_way",
    ),
    Mutant(
        name="grammar-reader-believed",
        breaks="The grammar state of one answer is used for another answer.",
        target="swarm.stage.engine.grammars:Grammars._reader",
        old="if reader is None or reader.grammar != grammar or answer[: len(reader.tokens)] != reader.tokens:",
        new="if reader is None or reader.grammar != grammar:",
        caught_by="tests/unit/stage/engine/test_grammars.py::test_the_mask_depends_on_nothing_but_the_tokens",
    ),
    Mutant(
        name="warm-up-left-out",
        breaks="A stage reports ready without a warm-up.",
        target="swarm.stage.engine.torch_executor:TorchExecutor.prepare",
        old="warm_up_s = sum(self._warm(self._loader.slice(stage, part)) for part in ranges_of(new))",
        new="warm_up_s = 0.0",
        caught_by="tests/model/test_executor.py::test_each_new_layer_is_warmed_up_once",
    ),
)

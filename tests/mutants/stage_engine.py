"""Mutants of swarm/stage/engine."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="program-bits-not-compared",
        breaks="A compiled program is used although its results differ from the modules'.",
        target="swarm.stage.engine.dry_runs:_compare_program",
        old="if result is None or by_modules is None or not torch.equal(result, by_modules):",
        new="if result is None or by_modules is None:",
        caught_by="tests/unit/stage/engine/test_programs.py::test_other_bits_turn_programs_off",
    ),
    Mutant(
        name="ends-inside-a-grammar",
        breaks="An answer may end before its grammar is complete.",
        target="swarm.stage.engine.grammars:GrammarMasks._compute_mask",
        old="goes_on, may_end = bool(mask.any()), bool(ends) and matcher.is_accepting()",
        new="goes_on, may_end = bool(mask.any()), bool(ends)",
        caught_by="tests/unit/stage/engine/test_grammars.py::test_the_mask_is_what_brute_force_finds",
    ),
    Mutant(
        name="ends-wait-for-nothing",
        breaks="`min_tokens` forbids the end of an answer that has no other continuation.",
        target="swarm.stage.engine.grammars:GrammarMasks._compute_mask",
        old="if may_end and not (goes_on and len(reader.tokens) < job.params.min_tokens):",
        new="if may_end and len(reader.tokens) >= job.params.min_tokens:",
        caught_by="tests/unit/stage/engine/test_grammars.py::test_min_tokens_waits_with_the_end_as_long_as_there_is_another_way",
    ),
    Mutant(
        name="grammar-reader-believed",
        breaks="The grammar state of one answer is used for another answer.",
        target="swarm.stage.engine.grammars:GrammarMasks._reader",
        old="if reader is None or reader.grammar != grammar or answer[: len(reader.tokens)] != reader.tokens:",
        new="if reader is None or reader.grammar != grammar:",
        caught_by="tests/unit/stage/engine/test_grammars.py::test_the_mask_depends_on_nothing_but_the_tokens",
    ),
    Mutant(
        name="warm-up-left-out",
        breaks="A stage reports ready without a warm-up.",
        target="swarm.stage.engine.torch_executor:TorchExecutor.prepare",
        old="warm_up_s = sum(self._warm_up_stage(self._loader.build_slice(stage, part)) for part in to_ranges(new))",
        new="warm_up_s = 0.0",
        caught_by="tests/model/test_executor.py::test_each_new_layer_is_warmed_up_once",
    ),
    Mutant(
        name="chunk-freed-under-a-slot",
        breaks="The pages of a shared chunk are freed while they are mapped over another slot.",
        target="swarm.stage.attention.sharing:SharedPages.leave",
        old="if not self.num_slots[chunk]:",
        new="if self.num_slots[chunk] < 2:",
        caught_by="tests/model/test_sharing.py::test_a_chunk_is_freed_with_its_last_holder",
    ),
    Mutant(
        name="chunk-never-freed",
        breaks="The pages of a chunk without a holder stay until all of its run are free.",
        target="swarm.stage.attention.sharing:SharedPages.leave",
        old="if not self.num_slots[chunk]:",
        new="if False:",
        caught_by="tests/model/test_sharing.py::test_a_chunk_is_freed_with_its_last_holder",
    ),
    Mutant(
        name="copies-end-sharing",
        breaks="A copy of other layers ends the sharing that the broker counts on.",
        target="swarm.stage.attention.shared_slots:SlotMappings.covers",
        old="return position < self.stop and any(layer in self.runs[0][0].layers for layer in layers)",
        new="return position < self.stop",
        caught_by="tests/model/test_sharing.py::test_copies_of_other_layers_are_not_shared",
    ),
    Mutant(
        name="pages-of-an-earlier-plan-shared-on",
        breaks="A sequence that still maps pages of an earlier plan is forked as if it mapped none.",
        target="swarm.stage.attention.shared_slots:SharedSlots.fork",
        old="other.copy_out()",
        new="pass",
        caught_by="tests/model/test_sharing.py::test_a_new_plan_counts_in_full_until_sequences_are_forked_again",
    ),
)

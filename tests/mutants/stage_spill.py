"""Mutants of keys and values on disk."""

from tests.mutants.mutant import Mutant

SPILL = "tests/unit/stage/test_kv_spill.py"
FILES = "tests/unit/stage/shell/test_spill_files.py"
RESTORING = "tests/unit/broker/steps/test_restoring.py"

MUTANTS = (
    Mutant(
        name="chunks-named-by-their-own-tokens",
        breaks="A chunk's name does not depend on the tokens before it.",
        target="swarm.stage.kv_spill:extend_name",
        old="digest = hashlib.blake2b(bytes.fromhex(before), digest_size=_DIGEST_BYTES)",
        new="digest = hashlib.blake2b(b'', digest_size=_DIGEST_BYTES)",
        caught_by=f"{SPILL}::test_a_name_depends_on_all_tokens_up_to_the_end_and_on_nothing_behind",
    ),
    Mutant(
        name="chunks-after-a-cut-keep-their-names",
        breaks="After a truncation, a chunk of other tokens gets the name of the one before.",
        target="swarm.stage.kv_spill:KvSpiller._name",
        old="del names[start // self.chunk :]",
        new="del names[start // self.chunk + 1 :]",
        caught_by=f"{SPILL}::test_a_truncated_sequence_is_written_again_from_where_it_differs",
    ),
    Mutant(
        name="chunks-begin-where-a-sequence-was-cut",
        breaks="A chunk begins within another one.",
        target="swarm.stage.kv_spill:KvSpiller.take_turn",
        old="start = sent.position // self.chunk * self.chunk",
        new="start = sent.position",
        caught_by=f"{SPILL}::test_a_truncated_sequence_is_written_again_from_where_it_differs",
    ),
    Mutant(
        name="excluded-sequences-lend-their-beginning",
        breaks="A sequence that begins as one with other bits is written.",
        target="swarm.stage.kv_spill:KvSpiller.add_opened",
        old="if item.source in self._excluded:",
        new="if False:",
        caught_by=f"{SPILL}::test_sequences_of_other_bits_and_what_begins_like_them_are_left_out",
    ),
    Mutant(
        name="spilling-takes-any-time",
        breaks="Chunks are read between steps without a limit.",
        target="swarm.stage.kv_spill:KvSpiller._may_write",
        old="return budget.left_s > 0.0",
        new="return True",
        caught_by=f"{SPILL}::test_steps_that_wait_leave_it_two_percent_of_the_time",
    ),
    Mutant(
        name="restored-gaps",
        breaks="Blocks from disk are stored although positions before them are missing.",
        target="swarm.stage.kv_restore:KvRestorer.on_read",
        old="if data.layers != self.spiller.layers or not position == data.start < data.stop <= current.stop:",
        new="if data.layers != self.spiller.layers:",
        caught_by=f"{SPILL}::test_only_what_joins_in_all_layers_is_stored",
    ),
    Mutant(
        name="restored-in-some-layers",
        breaks="Blocks from disk count although they are not of all layers.",
        target="swarm.stage.kv_restore:KvRestorer.on_read",
        old="if data.layers != self.spiller.layers or not position == data.start < data.stop <= current.stop:",
        new="if not position == data.start < data.stop <= current.stop:",
        caught_by=f"{SPILL}::test_only_what_joins_in_all_layers_is_stored",
    ),
    Mutant(
        name="restored-before-it-is-stored",
        breaks="Blocks from disk count although they could not be stored.",
        target="swarm.stage.kv_restore:KvRestorer.on_stored",
        old="if event.problem:",
        new="if False:",
        caught_by=f"{SPILL}::test_what_is_not_stored_does_not_count",
    ),
    Mutant(
        name="late-reads-count",
        breaks="What is read for an earlier order is stored.",
        target="swarm.stage.kv_restore:KvRestorer._find",
        old="if current is None or stored is None or current.order.ticket != event.ticket:",
        new="if current is None or stored is None:",
        caught_by=f"{SPILL}::test_an_answer_of_an_earlier_order_changes_nothing",
    ),
    Mutant(
        name="restoring-goes-on-beside-steps",
        breaks="A row of a sequence does not end its restoration.",
        target="swarm.stage.kv_restore:KvRestorer.on_step_started",
        old="for sequence in (*cuts, *step.release, *(row.sequence for row in step.rows)):",
        new="for sequence in (*cuts, *step.release):",
        caught_by=f"{SPILL}::test_what_is_read_after_the_end_is_dropped",
    ),
    Mutant(
        name="restoring-has-no-end",
        breaks="A stage reads on beyond the time that the order gave.",
        target="swarm.stage.kv_restore:KvRestorer._end_if_overdue",
        old="if now >= current.until:",
        new="if False:",
        caught_by=f"{SPILL}::test_time_ends_it_with_what_has_been_read",
    ),
    Mutant(
        name="damaged-files-count",
        breaks="The checksum of a file is not compared.",
        target="swarm.stage.shell.spill_files:_decode",
        old="if content[: _HEADER.size] != _header(file, dtype, data):",
        new="if len(data) != _HEADER.unpack_from(content)[3]:",
        caught_by=f"{FILES}::test_a_flipped_bit_anywhere_makes_it_missing",
    ),
    Mutant(
        name="files-of-any-name",
        breaks="A file counts under another name than its own.",
        target="swarm.stage.shell.spill_files:_header",
        old="""
            digest = xxhash.xxh3_128(f"{file.model} {file.name} {file.index} {file.layer} {dtype} {len(data)}\\n".encode())
        """,
        new="""
            digest = xxhash.xxh3_128(f"{dtype} {len(data)}\\n".encode())
        """,
        caught_by=f"{FILES}::test_a_file_under_another_name_is_missing",
    ),
    Mutant(
        name="files-for-everybody",
        breaks="Other users may read files that reveal prompts.",
        target="swarm.stage.shell.spill_files:SpillFiles.write",
        old="descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)",
        new="descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)",
        caught_by=f"{FILES}::test_files_are_private",
    ),
    Mutant(
        name="files-in-a-folder-of-others",
        breaks="A folder that other users can write is used.",
        target="swarm.stage.shell.spill_files:SpillFiles._check_root",
        old="if status.st_mode & 0o022:",
        new="if False:",
        caught_by=f"{FILES}::test_a_folder_that_others_can_write_is_not_used",
    ),
    Mutant(
        name="torn-files-stay",
        breaks="A torn file counts as written.",
        target="swarm.stage.shell.spill_files:SpillFiles._has_file",
        old="if _is_private_file(status) and status.st_size == num_bytes:",
        new="if _is_private_file(status):",
        caught_by=f"{FILES}::test_a_torn_file_is_written_again",
    ),
    Mutant(
        name="files-fill-the-disk",
        breaks="Nothing of the disk stays free.",
        target="swarm.stage.shell.spill_files:SpillFiles._missing_bytes",
        old="return num_bytes + disk.total // _RESERVE - disk.free",
        new="return num_bytes - disk.free",
        caught_by=f"{FILES}::test_a_twentieth_of_the_disk_stays_free",
    ),
    Mutant(
        name="positions-of-one-stage",
        breaks="A sequence goes on from the position of the stage that answers last.",
        target="swarm.broker.state.restores:Restore.record_answer",
        old="self.position = position if self.position is None else min(self.position, position)",
        new="self.position = position",
        caught_by=f"{RESTORING}::test_a_stage_without_anything_ends_the_wait",
    ),
    Mutant(
        name="positions-of-some-stages",
        breaks="A sequence goes on before all stages have answered.",
        target="swarm.broker.steps.restoring:Restorer.on_restored",
        old="if not item.unanswered and item.position is not None:",
        new="if item.position is not None:",
        caught_by=f"{RESTORING}::test_it_goes_on_from_the_least_position_of_all_stages",
    ),
    Mutant(
        name="restored-without-a-cut",
        breaks="Stages that have read more are not cut to the position from which a sequence goes on.",
        target="swarm.broker.state.sequences:Sequence.finish_restore",
        old="self.truncate = True",
        new="",
        caught_by=f"{RESTORING}::test_it_goes_on_from_the_least_position_of_all_stages",
    ),
    Mutant(
        name="waits-for-the-disk-for-ever",
        breaks="A request waits until all stages have answered.",
        target="swarm.broker.steps.restoring:Restorer.tick",
        old="elif now >= item.deadline:",
        new="elif False:",
        caught_by=f"{RESTORING}::test_nothing_counts_if_an_answer_is_missing_at_the_deadline",
    ),
    Mutant(
        name="half-an-answer-at-the-deadline",
        breaks="What some stages have read counts when the deadline has passed.",
        target="swarm.broker.steps.restoring:Restorer.tick",
        old="self._finish(item, item.start, now)",
        new="self._finish(item, item.position or item.start, now)",
        caught_by=f"{RESTORING}::test_nothing_counts_if_an_answer_is_missing_at_the_deadline",
    ),
    Mutant(
        name="spilling-with-unlike-bits",
        breaks="Stages with unlike bits write and read.",
        target="swarm.broker.steps.restoring:Restorer._common_bits",
        old="""
            return bits.pop() if can_spill and len(bits) == 1 and not self.state.state_stride else ""
        """,
        new="""
            return bits.pop() if can_spill and not self.state.state_stride else ""
        """,
        caught_by=f"{RESTORING}::test_otherwise_they_write_and_read_nothing",
    ),
    Mutant(
        name="sequences-of-other-bits-are-written",
        breaks="Keys and values of a plan with other bits are written under the bits of the next one.",
        target="swarm.broker.state.restores:RestoreState.start_plan",
        old="if not bits or bits != self.bits:",
        new="if False:",
        caught_by=f"{RESTORING}::test_sequences_of_a_plan_with_other_bits_are_not_written",
    ),
)

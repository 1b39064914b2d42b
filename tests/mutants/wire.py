"""Mutants of swarm/wire."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="checksum-not-verified",
        breaks="The checksum of a received tensor is not verified.",
        target="swarm.wire.codec:MessageCodec.decode",
        old="""
        if payload is not None and spec is not None and spec.checksum and tensors.checksum(payload) != spec.checksum:
        """,
        new="if payload is not None and spec is not None and spec.checksum == 1:",
        caught_by="sim garble from 2",
    ),
    Mutant(
        name="given-up-for-good",
        breaks="A connection that libzmq gave up is never opened again.",
        target="swarm.wire.dealer:DealerChannel._on_monitor_event",
        old="self._schedule_reconnect(_RECONNECT_GRACE_S)",
        new="self._cancel_reconnect()",
        caught_by="tests/integration/test_between.py::test_a_damaged_message_costs_a_connection_and_no_more",
    ),
    Mutant(
        name="forged-refusal-believed",
        breaks="A client trusts a refusal of its key that it cannot verify.",
        target="swarm.wire.dealer:DealerChannel._on_rejected",
        old="if self._pair is None:",
        new="if self._pair is not None:",
        caught_by="tests/integration/test_between.py::test_a_forged_refusal_silences_nobody",
    ),
    Mutant(
        name="digest-not-compared",
        breaks="A stage's KV for a sequence number is reused without comparing the digests of its tokens.",
        target="swarm.wire.digests:num_matching",
        old="if own == reported:",
        new="if length:",
        caught_by="tests/unit/broker/recovery/test_lineage.py::test_what_was_computed_from_other_tokens_is_nothing",
    ),
    Mutant(
        name="other-build-taken-for-ours",
        breaks="A peer with the same protocol version but other message types is accepted.",
        target="swarm.wire.greeting:incompatibility",
        old="if max(theirs.versions) == PROTOCOL_VERSION and theirs.schema != schema:",
        new="if max(theirs.versions) != PROTOCOL_VERSION and theirs.schema != schema:",
        caught_by="tests/unit/wire/test_greeting.py::test_a_later_build_is_read_and_named",
    ),
    Mutant(
        name="field-of-clients-untold",
        breaks="A message of the client protocol has a field that docs/reference/protocol.md does not describe.",
        target="swarm.wire.messages.clients:Stop",
        old="at_index: Position",
        new="""
            at_index: Position
            softly: bool = False
        """,
        caught_by="tests/unit/wire/test_protocol_page.py::test_every_message_has_its_table",
    ),
    Mutant(
        name="dtype-hides-another-model",
        breaks="A worker with other model files is reported as one whose weights have another type.",
        target="swarm.wire.messages.manifest:Manifest.differs_only_in_dtype",
        old="return self.dtype != other.dtype and self.difference(msgspec.structs.replace(other, **sizes)) is None",
        new="return self.dtype != other.dtype and len(sizes) > 0",
        caught_by="tests/unit/broker/members/test_dtype.py::test_another_model_in_another_dtype_is_another_model",
    ),
    Mutant(
        name="rest-of-a-message-sent-twice",
        breaks="After a partial send, the whole message is sent again.",
        target="swarm.wire.push:PushChannel.send_all",
        old="self._unsent.append(_Unsent(parts, sent=sent))",
        new="self._unsent.append(_Unsent(parts))",
        caught_by="tests/integration/test_push.py::test_all_of_many_messages_arrive_in_order",
    ),
    Mutant(
        name="chunk-freed-with-its-first-holder",
        breaks="A shared chunk counts as free while another sequence holds it.",
        target="swarm.wire.shared_positions:SharedPositions.release",
        old="num_kept += self.unit if run.holders[chunk] else 0",
        new="num_kept += 0",
        caught_by="tests/unit/wire/test_shared_positions.py",
    ),
    Mutant(
        name="runs-without-limit",
        breaks="A long conversation takes any number of mappings.",
        target="swarm.wire.shared_positions:SharedPositions.fork_stop",
        old="return target if len(holder.inherited) < MAX_RUNS else min(target, holder.inherited_stop)",
        new="return target",
        caught_by="tests/unit/wire/test_shared_positions.py",
    ),
    Mutant(
        name="departures-forecast-one-by-one",
        breaks="The forecast of what several sequences free together overlooks chunks that only they hold.",
        target="swarm.wire.shared_positions:Departures.add",
        old="num_kept += self.shared.unit if run.holders[chunk] > self._num_gone(run, chunk) else 0",
        new="num_kept += self.shared.unit if run.holders[chunk] > 1 else 0",
        caught_by="tests/unit/wire/test_shared_positions.py",
    ),
)

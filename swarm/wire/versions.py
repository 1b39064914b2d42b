"""Protocol versions: what each one added, and how this build encodes a message for an older peer.

All builds of one version have exactly the same messages; a test compares each version with its schema digest
(``schema``). A version only adds: kinds of messages, and fields with a default to existing kinds. A newer peer
therefore understands every message of an older one, and leaves out what the older one lacks. (Version 4 has removed
three kinds that no build had ever sent.) A message that the older peer would misunderstand without the new field is not
sent to it: encoding it raises an error that names the remedy. Small records (arrays) never get new fields; a new record
replaces them.

Steps between stages are encoded in the version that defined them. When they change, ``Prepare`` must name the version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from swarm.errors import WireError
from swarm.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION

VERSIONS: Final = tuple(range(OLDEST_VERSION, PROTOCOL_VERSION + 1))

# Per version: the kinds and fields (``kind.field``, ``kind.field.part``) that it added. True: an older peer may go
# without it.
ADDED: Final[Mapping[int, Mapping[str, bool]]] = {
    2: {
        "hello.build": True,
        "hello.kv_share": True,
        "hello.settings": True,
        "release.again": False,
        "show_settings": False,
        "shun": False,
        "stop_worker.again": False,
    },
    3: {
        "cancel.if_reader": True,
        "denied.dtype": True,
        "enrol.proof": True,
        "look_up": False,
        "recalled.submit.keep_s": True,
        "self_tested": False,
        "snapshot": False,
        "submit.keep_s": False,
        "trouble.failed": True,
    },
    4: {
        "description.manifest.activations": True,
        "description.manifest.adapters": True,
        "description.manifest.extra_width": True,
        "description.manifest.image_bytes": True,
        "description.manifest.is_headless": True,
        "description.manifest.num_labels": True,
        "description.manifest.pooling": True,
        "description.manifest.shared_bytes": True,
        "description.manifest.state_bytes": True,
        "description.manifest.state_stride": True,
        "description.manifest.vision": True,
        "description.manifest.weights": True,
        "adapters": False,
        "adapters_set": False,
        "set_adapters": False,
        "activate.share_unit": False,
        "activate.shared": False,
        "activated.copies": True,
        "join.device": False,
        "start_workers.device": False,
        "hello.adapters": True,
        "hello.bits": True,
        "hello.dtypes": True,
        "hello.kv_endpoint": True,
        "finished.prompt_logprobs": True,
        "finished.vector": True,
        "hello.manifest.activations": False,
        "hello.manifest.adapters": False,
        "hello.manifest.extra_width": True,
        "hello.manifest.image_bytes": True,
        "hello.manifest.is_headless": False,
        "hello.manifest.num_labels": False,
        "hello.manifest.pooling": True,
        "hello.manifest.shared_bytes": True,
        "hello.manifest.state_bytes": False,
        "hello.manifest.state_stride": False,
        "hello.manifest.vision": False,
        "hello.manifest.weights": False,
        "hello.spill_from": True,
        "kept.bits": True,
        "kv_held": False,
        "kv_restored": False,
        "kv_part.open": False,
        "kv_part.sender": False,
        "kv_part.tokens": False,
        "prepared.share_mappings": True,
        "prepared.share_unit": True,
        "receive_kv": False,
        "recalled.submit.params.adapter": True,
        "recalled.submit.params.images": True,
        "recalled.submit.params.prompt_logprobs": True,
        "recalled.submit.params.thinking": True,
        "recalled.submit.params.vector": True,
        "recalled.submit.pixels": True,
        "recalled.submit.speculation": True,
        "restore_kv": False,
        "replay.more": False,
        "replay_done.more": False,
        "send_kv": False,
        "spill_kv": False,
        "step.image_parts": False,
        "step.pixels": False,
        "step.proposed": False,
        "step.unshared": False,
        "step_done.forced": True,
        "step_done.prompt_logprobs": True,
        "step_done.vectors": True,
        "snapshot.finished.prompt_logprobs": True,
        "snapshot.finished.vector": True,
        "snapshot.submit.params.adapter": True,
        "snapshot.submit.params.images": True,
        "snapshot.submit.params.prompt_logprobs": True,
        "snapshot.submit.params.thinking": True,
        "snapshot.submit.params.vector": True,
        "snapshot.submit.pixels": True,
        "snapshot.submit.speculation": True,
        "submit.params.adapter": False,
        "submit.params.images": False,
        "submit.params.prompt_logprobs": False,
        "submit.params.thinking": False,
        "submit.params.vector": False,
        "submit.pixels": False,
        "submit.speculation": True,
        "trouble.kv_overfull": True,
        "trouble.misplaced": True,
    },
}


def newest_common(theirs: Iterable[int]) -> int | None:
    """Return the newest version that both sides support, or None."""
    return max(set(theirs) & set(VERSIONS), default=None)


def downgrade_header(version: int, kind: str, header: bytes) -> bytes:
    """Return a message's header in the encoding of an older version. Raises WireError if that version can't express
    it."""
    added = [(newer, name) for newer in VERSIONS if newer > version for name in ADDED[newer] if _belongs_to(name, kind)]
    if not added:
        return header
    fields: dict[str, Any] = msgspec.msgpack.decode(header)
    for newer, name in added:
        value = _remove_field(fields, name.split(".")[1:], version)
        if value and not ADDED[newer][name]:
            raise WireError(f"{name} needs version {newer} of the protocol, the peer supports {version}: upgrade it")
    fields["v"] = min(fields["v"], version)
    return msgspec.msgpack.encode(fields)


def _remove_field(fields: dict[str, Any], path: list[str], version: int) -> object:
    """Remove a field that version ``version`` of the protocol lacks from a message's fields.

    Returns the removed value; False if the field is absent, and thus has its default; True if ``path`` is empty,
    because the whole message kind is missing in that version. Lowers the version of a nested message on the path, too.
    """
    if not path:
        return True
    for part in path[:-1]:
        fields = fields.get(part) or {}
        if "v" in fields:
            fields["v"] = min(fields["v"], version)
    return fields.pop(path[-1], False)


def _belongs_to(name: str, kind: str) -> bool:
    return name.partition(".")[0] == kind

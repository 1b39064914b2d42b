"""Choice of the variant of our kernels by the settings ``worker.kernels`` and ``worker.bits``.

Variants of the portable family compute the same sums in the same order and round them in the same way on every
processor, so they have the same bits. Other variants use instructions that multiply bfloat16 directly, and have bits of
their own for it. In float32 their bits are the family's.
"""

from __future__ import annotations

from swarm.errors import ConfigError
from swarm.stage import native

PORTABLE = ("avx512", "avx2", "neon", "portable")  # the portable family of variants


def select_kernels(kernels: str, bits: str) -> None:
    """Select the configured kernels for this process. Raises ``ConfigError`` if they can't run here."""
    if kernels == "torch":
        native.disable("worker.kernels is torch")
        return
    opened = native.library()
    if opened is None:
        if kernels == "auto" and bits != "portable":
            return
        setting = f"worker.kernels = {kernels!r}" if kernels != "auto" else "worker.bits = 'portable'"
        raise ConfigError(f"{setting} needs Swarm's own kernels, which are unavailable: {native.unavailable_reason()}")
    available = native.variants(opened)
    if kernels not in ("auto", *available):
        raise ConfigError(
            f"worker.kernels = {kernels!r} can't run on this processor; it can run {', '.join(available)}, or torch's"
        )
    wanted = [name for name in available if _is_wanted(name, kernels, bits)]
    if not native.use_first_valid(opened, wanted):
        if kernels == "auto" and bits != "portable":
            native.disable(f"only the portable C kernels work here, and torch's are faster{_rejected_note()}")
            return
        why = native.rejected_variants() or f"worker.kernels = {kernels!r} has bits of its own"
        raise ConfigError(
            f"worker.kernels = {kernels!r} with worker.bits = {bits!r} is not possible on this processor ({why}); "
            f"worker.kernels = 'auto' chooses kernels that are"
        )


def _is_wanted(name: str, kernels: str, bits: str) -> bool:
    """Whether a setting allows this variant of the kernels. Portable C is many times slower than torch's kernels, so it
    is used only if it or its portable bits are requested."""
    if kernels == "auto" and bits != "portable":
        return name != "portable"
    return kernels in ("auto", name) and (bits != "portable" or name in PORTABLE)


def _rejected_note() -> str:
    return f" ({native.rejected_variants()})" if native.rejected_variants() else ""


def require_portable(*, own: bool) -> None:
    """Raise ``ConfigError`` unless this process computes its model with our ``own`` kernels, which alone have portable
    bits."""
    if not own:
        why = native.unavailable_reason() or "they don't compute in its dtype"
        raise ConfigError(
            f"worker.bits = 'portable' is not possible for this model, since torch's kernels compute it: {why}"
        )

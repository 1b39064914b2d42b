"""Mutants of swarm/api_keys and swarm/private_files.py."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="http-revoked-key-still-opens",
        breaks="A revoked API key works until the gateway restarts.",
        target="swarm.api_keys.file:ReloadingKeyFile.refresh",
        old="self.keys = ring",
        new="self.ring = self.ring or ring",
        caught_by="tests/unit/gateway/test_guard.py::test_keys_come_and_go_without_a_restart",
    ),
    Mutant(
        name="http-key-known-by-its-id",
        breaks="An API key is accepted by its public id without its secret.",
        target="swarm.api_keys.keys:KeySet.find",
        old="return key if key.matches(match[2]) else None",
        new="return key if key is not _NO_KEY else None",
        caught_by="tests/unit/api_keys/test_keys.py::test_a_key_is_recognised_and_nothing_else_is",
    ),
    Mutant(
        name="http-keys-readable-by-all",
        breaks="A key file that other users can read is accepted.",
        target="swarm.private_files:_check_private",
        old="if status.st_mode & 0o077 & ~by_group:",
        new="if status.st_mode & 0o022 & ~by_group:",
        caught_by="tests/unit/api_keys/test_keys.py::test_a_file_that_others_may_read_is_refused",
    ),
)

"""Mutants of swarm/hub."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="tensors-share-bytes",
        breaks="Two tensors of a file may overlap.",
        target="swarm.hub.headers:check_no_overlap",
        old="if tensor.num_bytes and tensor.offset < stop:",
        new="if tensor.num_bytes and tensor.offset < 0:",
        caught_by="tests/unit/stage/model/test_hostile_files.py::test_a_hostile_entry_of_a_header_is_refused",
    ),
    Mutant(
        name="hub-room-not-looked-at",
        breaks="A download starts although the disk has too little space.",
        target="swarm.hub.download:Download._check_space",
        old="if num_bytes > free:",
        new="if num_bytes < 0:",
        caught_by="tests/unit/test_hub.py::test_a_disk_without_room_is_not_begun_with",
    ),
    Mutant(
        name="hub-fetches-the-latest",
        breaks="Weights are downloaded from the latest commit instead of the commit of the small files.",
        target="swarm.hub.download:Download._fetch",
        old="revision=self.folder.name,",
        new="revision=None,",
        caught_by="tests/unit/test_hub.py::test_weights_are_of_the_commit_that_was_looked_up",
    ),
    Mutant(
        name="hub-index-names-any-path",
        breaks="An index of shards may name files outside of the model's folder.",
        target="swarm.hub.lookup:shards_of",
        old="invalid += [name for name in names if isinstance(name, str) and Path(name).name != name]",
        new="",
        caught_by="tests/unit/test_hub.py::test_an_index_names_files_beside_it",
    ),
    Mutant(
        name="hub-range-of-any-file",
        breaks="Parts of a file of another size are accepted.",
        target="swarm.hub.http:_check_is_same_file",
        old='if reported.get("content-range", "") != expected_range:',
        new='if reported.get("content-range", "") == "":',
        caught_by="tests/unit/test_hub_gguf.py::test_a_file_that_changed_is_refused",
    ),
    Mutant(
        name="hub-whole-file-not-verified",
        breaks="A file that was fetched in parts becomes the hub's own without a look at its sha256.",
        target="swarm.hub.partial_file:PartialFile.verify",
        old="if is_right:",
        new="if is_right := True:",
        caught_by="tests/unit/test_hub_gguf.py::test_wrong_bytes_are_found_when_the_file_is_whole",
    ),
    Mutant(
        name="hub-missing-parts-are-zeros",
        breaks="A tensor that was not fetched is read as zeros.",
        target="swarm.hub.presence:check_present",
        old="if missing and tensor.path.resolve() == path:",
        new="if False:",
        caught_by="tests/unit/test_hub_gguf.py::test_a_tensor_that_was_not_fetched_is_not_read_as_zeros",
    ),
    Mutant(
        name="hub-record-outlives-data",
        breaks="The record of the ranges is believed although the data is gone.",
        target="swarm.hub.partial_file:PartialFile._remove",
        old="self._record_path.unlink(missing_ok=True)",
        new="pass",
        caught_by="tests/unit/test_hub_gguf.py::test_data_that_was_removed_is_fetched_again",
    ),
)

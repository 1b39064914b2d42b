"""Mutants of swarm/hub."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="tensors-share-bytes",
        breaks="Two tensors of a file may overlap.",
        target="swarm.hub.headers:_check_no_overlap",
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
)

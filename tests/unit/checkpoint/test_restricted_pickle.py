"""Saves that attack their reader: nothing in them is executed, read from elsewhere, or allocated."""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import _utils as rebuild

from hpctrain.checkpoint.compare_saves import compare_saves
from hpctrain.checkpoint.restricted_pickle import UnknownObject
from hpctrain.checkpoint.saved_tensors import parts_of, read_part

CODE = 123
"""Of an extension of copyreg, which stands for os.mkdir."""
ATTACKS = {
    "GLOBAL and REDUCE": b"cos\nmkdir\n(V%s\ntR.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93(V%s\ntR.",
    "INST": b"(V%s\nios\nmkdir\n.",
    "OBJ": b"(cfunctools\npartial\ncos\nmkdir\nV%s\no)R.",
    "NEWOBJ": b"\x80\x02cfunctools\npartial\n(cos\nmkdir\nV%s\nt\x81)R.",
    "NEWOBJ_EX": b"\x80\x04cfunctools\npartial\n(cos\nmkdir\nV%s\nt}\x92)R.",
    "EXT1": b"\x80\x02\x82%c(V%%s\ntR." % CODE,
    "BUILD": b"\x80\x02cfunctools\npartial\n(cos\nlistdir\nt\x81(cos\nmkdir\n(V%s\nt}}tb)R.",
    "a method": b"cbuiltins\ngetattr\n(cpathlib\nPath\n(V%s\ntRVmkdir\ntR)R.",
    "exec": b"cbuiltins\nexec\n(Vimport os; os.mkdir('%s')\ntR.",
    "a name with dots": b"\x80\x04\x8c\x05torch\x8c\x08os.mkdir\x93(V%s\ntR.",
    "rebuilding": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nmkdir\ncbuiltins\nset\n(V%s\nt}tR.",
    "in a container": b"ccollections\nCounter\n(cbuiltins\nmap\n(cos\nmkdir\n(lV%s\natRtR.",
}


@pytest.fixture
def extension():
    copyreg.add_extension("os", "mkdir", CODE)
    yield
    copyreg.remove_extension("os", "mkdir", CODE)


def as_torch(program, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")


def as_legacy(program, path):
    head = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
    path.write_bytes(b"".join(map(pickle.dumps, head)) + program + pickle.dumps([]))


def attempt_to_read(path):
    """Read a save; return its tensors, or None if it was refused."""
    try:
        return read_part(path)
    except Exception:
        return None


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_no_instruction_executes_anything(tmp_path, attack):
    made = tmp_path / "made"
    program = attack % bytes(made)
    with contextlib.suppress(AttributeError):  # afterwards, because the result is no tensor
        pickle.loads(program)
    assert made.is_dir()  # the attack is one
    made.rmdir()
    (tmp_path / "a.pkl").write_bytes(program)
    as_torch(program, tmp_path / "a.pt")
    as_legacy(program, tmp_path / "b.pt")
    for name in ("a.pkl", "a.pt", "b.pt"):
        attempt_to_read(tmp_path / name)
        assert not made.exists(), name


class Reference(pickle.Pickler):
    """Writes `id` instead of this class."""

    def __init__(self, file, identity):
        super().__init__(file, protocol=2)
        self.identity = identity

    def persistent_id(self, value):
        return self.identity if value is Reference else None


def referring(identity):
    file = io.BytesIO()
    arguments = (Reference, 0, (4,), (1,), False, OrderedDict())
    Reference(file, identity).dump(Call(rebuild._rebuild_tensor_v2, arguments))
    return file.getvalue()


class Call:
    """An object that is made by calling a function."""

    def __init__(self, function, arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("key", ["../../secret", "/etc/passwd", "0", -1])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_persistent_id_leads_to_no_other_file(tmp_path, key):
    (tmp_path / "secret").write_bytes(bytes(16))
    identity = ("storage", torch.FloatStorage, key, "cpu", 4)
    as_torch(referring(identity), tmp_path / "a.pt")
    (tmp_path / "a.pkl").write_bytes(referring(identity))
    for name in ("a.pt", "a.pkl"):
        assert attempt_to_read(tmp_path / name) is None


@pytest.mark.parametrize("kind", [OrderedDict, UnknownObject, torch.nn.Module])
def test_an_old_reference_to_source_code_writes_no_patch(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    # torch compares the source, and would write the difference into the working directory
    as_legacy(referring(("module", kind, "a.py", "class A: pass")), Path("a.pt"))
    assert attempt_to_read(Path("a.pt")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_nothing_is_allocated_because_a_save_says_so(tmp_path):
    size = 2**45
    programs = [b"cbuiltins\nbytearray\n(L%dL\ntR." % size, b"\x80\x05\x96" + size.to_bytes(8, "little") + b"abc."]
    for program in programs:
        (tmp_path / "a.pkl").write_bytes(program)
        attempt_to_read(tmp_path / "a.pkl")
    torch.save(torch.ones(1).expand(2**33), tmp_path / "wide.pt")
    with pytest.raises(ValueError, match="expands 4 bytes to a tensor of 34359738368 bytes"):
        read_part(tmp_path / "wide.pt")


def test_a_tensor_beyond_its_data_is_refused(tmp_path):
    storage = torch.ones(4).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    for size, offset in ((5, 0), (4, 1), (4, -1)):
        arguments = (typed, offset, (size,), (1,), False, OrderedDict())
        torch.save(Call(rebuild._rebuild_tensor_v2, arguments), tmp_path / "a.pt")
        assert attempt_to_read(tmp_path / "a.pt") is None


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11's, though check_invariants is given
def test_wrong_indices_of_a_sparse_tensor_are_not_used(tmp_path):
    wrong = torch.sparse_coo_tensor(torch.tensor([[10**12]]), torch.ones(1), (2,), check_invariants=False)
    torch.save({"w": wrong, "rows": torch.eye(2).to_sparse_csr()}, tmp_path / "a.pt")
    if torch.__version__ >= (2, 14):  # which checks them itself
        with pytest.raises(RuntimeError, match="index"):
            read_part(tmp_path / "a.pt")
        return
    saved = read_part(tmp_path / "a.pt")
    assert saved.tensors["w.indices"]().tolist() == [[10**12]]
    assert saved.tensors["rows.rows"]().tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("target", ["../secret.distcp", "absolute", "pipe"])
def test_a_folder_of_dcp_reads_its_own_files_alone(tmp_path, target):
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "dcp")
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    shutil.copy(data, tmp_path / "secret.distcp")
    os.mkfifo(tmp_path / "dcp/pipe")
    path = tmp_path / "dcp/.metadata"
    metadata = pickle.loads(path.read_bytes())
    name = str(tmp_path / "secret.distcp") if target == "absolute" else target
    metadata.storage_data = {key: replace(one, relative_path=name) for key, one in metadata.storage_data.items()}
    path.write_bytes(pickle.dumps(metadata))
    saved = read_part(tmp_path / "dcp")
    with pytest.raises(ValueError, match="isn't a file of the folder"):
        saved.tensors["w"]()


def test_links_and_pipes_in_a_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save({"w": torch.ones(1)}, folder / "a.pt")
    (folder / "nowhere.pt").symlink_to("missing.pt")
    (folder / "itself.pt").symlink_to("itself.pt")
    (folder / "up").symlink_to("..")
    (folder / "device.pt").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.pt")
    assert list(parts_of(folder)) == ["a.pt"]
    assert compare_saves(folder, folder).equal == 1


def test_a_key_that_is_an_object_has_the_same_name_each_time(tmp_path):
    torch.save({Call(Path, ("a",)): torch.ones(1)}, tmp_path / "a.pt")
    assert list(read_part(tmp_path / "a.pt").tensors) == ["pathlib.Path('a')"]

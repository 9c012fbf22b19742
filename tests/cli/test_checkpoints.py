"""What gramscope analyze reads of each kind of file, and what it says of those that it cannot read."""

import gzip
import json
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from gramscope.base.errors import InputError
from gramscope.cli.checkpoint import read_checkpoint
from gramscope.cli.main import app


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def write_torch(path):
    torch.save(network().state_dict(), path)


def write_nested(path):
    torch.save({"epoch": 3, "model": {"state_dict": network().state_dict()}, "history": [1.0]}, path)


def write_legacy(path):
    torch.save(network().state_dict(), path, _use_new_zipfile_serialization=False)


def write_safetensors(path):
    save_file(network().state_dict(), path)


def write_scripted(path):
    torch.jit.script(network()).save(str(path))


def write_traced(path):
    torch.jit.trace(network(), torch.ones(2, 6)).save(str(path))


def write_npz(path):
    with open(path, "wb") as file:
        np.savez(file, **{name: value.numpy() for name, value in network().state_dict().items()})


def write_npz_compressed(path):
    with open(path, "wb") as file:
        np.savez_compressed(file, **{name: value.numpy() for name, value in network().state_dict().items()})


READ = {
    "m.pt": write_torch,
    "m.ckpt": write_nested,
    "old.pth": write_legacy,
    "m.safetensors": write_safetensors,
    "m.jit": write_scripted,
    "traced.pt": write_traced,
    "m.npz": write_npz,
    "compressed.npz": write_npz_compressed,
    # What a file holds decides, not what it is called.
    "safetensors.bin": write_safetensors,
    "torch.safetensors": write_torch,
    "arrays": write_npz,
    "script.pkl": write_scripted,
}


@pytest.mark.parametrize("name", READ)
def test_read(name, tmp_path):
    READ[name](tmp_path / name)
    read = read_checkpoint(tmp_path / name)
    expected = network().state_dict()
    assert set(read.tensors) == set(expected)
    assert all(torch.equal(value, expected[key]) for key, value in read.tensors.items())


@pytest.mark.parametrize("share", [0.05, 0.5, 0.98])
@pytest.mark.parametrize("name", READ)
def test_a_file_cut_short_is_called_so(name, share, tmp_path):
    READ[name](tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    done = CliRunner().invoke(app, ["analyze", str(tmp_path / name)])
    assert done.exit_code == 2
    assert "cut short or damaged" in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "m.jit", "m.npz", "m.pkl"])
def test_an_empty_file_is_called_empty(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(InputError, match="it is empty"):
        read_checkpoint(tmp_path / name)


class Owner:
    """Not plain tensors: reading it would run code."""

    def __init__(self):
        self.weight = torch.ones(3, 4)


class WithState(nn.Module):
    """Its __setstate__ is run by torch.jit.load."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor):
        return x @ self.weight

    @torch.jit.export
    def __getstate__(self):
        return self.weight, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]):
        print("the script runs")
        self.weight = state[0]
        self.training = state[1]


def write_pickle(path):
    path.write_bytes(pickle.dumps({"weight": np.ones((3, 4))}))


def write_old_pickle(path):
    path.write_bytes(pickle.dumps({"weight": torch.ones(3, 4)}, protocol=0))


def write_object(path):
    torch.save(Owner(), path)


def write_legacy_object(path):
    torch.save(Owner(), path, _use_new_zipfile_serialization=False)


def write_exported(path):
    torch.export.save(torch.export.export(network(), (torch.ones(2, 6),)), path)


def write_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def write_scripted_with_state(path):
    torch.jit.script(WithState()).save(str(path))


def write_gzip(path):
    write_torch(path)
    path.write_bytes(gzip.compress(path.read_bytes()))


# Whole files that are not read: what is said of them, and what to do.
REFUSED = {
    "m.pkl": (write_pickle, "it is a pickle", "safetensors"),
    "old.pkl": (write_old_pickle, "it is a pickle", "safetensors"),
    "object.pt": (write_object, "Owner", "state_dict"),
    "old-object.pt": (write_legacy_object, "Owner", "state_dict"),
    "exported.pt2": (write_exported, "torch.export", "state_dict"),
    "text.zip": (write_zip, "zip archive", "readme.txt"),
    "state.jit": (write_scripted_with_state, "__setstate__", "state_dict"),
    "m.pt.gz": (write_gzip, "gzip", "gunzip"),
    "m.h5": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64)), "HDF5", "safetensors"),
    "m.gguf": (lambda path: path.write_bytes(b"GGUF" + bytes(64)), "GGUF", "safetensors"),
    "notes.txt": (lambda path: path.write_text("no tensors here"), "not one of these", "safetensors"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_whole_file_that_is_refused_is_not_called_damaged(name, tmp_path, capfd):
    write, why, advice = REFUSED[name]
    write(tmp_path / name)
    done = CliRunner().invoke(app, ["analyze", str(tmp_path / name)])
    assert done.exit_code == 2, done.output
    assert why in done.output
    assert advice in done.output
    assert "damaged" not in done.output
    assert "weights_only=False" not in done.output
    assert "the script runs" not in capfd.readouterr().out
    assert len(done.output.strip().splitlines()) == 1


def test_one_array_and_arrays_that_are_no_numbers(tmp_path):
    np.save(tmp_path / "one.npy", np.ones((3, 4)))
    assert list(read_checkpoint(tmp_path / "one.npy").tensors) == ["weight"]
    arrays = {"w": np.ones((3, 4), np.float16), "words": np.array(["a"]), "things": np.array([{}], dtype=object)}
    np.savez(tmp_path / "mixed.npz", **arrays)
    read = read_checkpoint(tmp_path / "mixed.npz")
    assert list(read.tensors) == ["w"]
    reasons = {skipped.name: skipped.reason for skipped in read.left_out}
    assert "object" in reasons["things"]
    assert "<U1" in reasons["words"]


def shards(folder, kind):
    folder.mkdir()
    state = network().state_dict()
    parts = {f"model-0000{i + 1}-of-00002.{kind}": dict(list(state.items())[2 * i : 2 * i + 2]) for i in range(2)}
    for name, part in parts.items():
        save_file(part, folder / name) if kind == "safetensors" else torch.save(part, folder / name)
    stem = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    index = {"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / f"{stem}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return list(parts)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_folder_of_shards(kind, tmp_path):
    names = shards(tmp_path / "m", kind)
    expected = network().state_dict()
    for path in (tmp_path / "m", tmp_path / "m" / next(p.name for p in (tmp_path / "m").glob("*.index.json"))):
        read = read_checkpoint(path)
        assert {key: value.tolist() for key, value in read.tensors.items()} == {
            key: value.tolist() for key, value in expected.items()
        }
    (tmp_path / "m" / names[1]).unlink()
    with pytest.raises(InputError, match=f"{names[1]}.*no such file"):
        read_checkpoint(tmp_path / "m")


def test_a_folder_with_one_checkpoint(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    with pytest.raises(InputError, match="holds no checkpoint"):
        read_checkpoint(folder)
    write_safetensors(folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"")
    assert set(read_checkpoint(folder).tensors) == set(network().state_dict())
    write_torch(folder / "other.pt")
    assert set(read_checkpoint(folder).tensors) == set(network().state_dict()), "safetensors first, as its users do"
    shutil.copy(folder / "model.safetensors", folder / "second.safetensors")
    with pytest.raises(InputError, match=r"several: model\.safetensors, second\.safetensors"):
        read_checkpoint(folder)


def test_an_index_reaches_no_other_folder(tmp_path):
    shards(tmp_path / "m", "safetensors")
    write_safetensors(tmp_path / "secret.safetensors")
    index = {"weight_map": {"0.weight": "../secret.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"\.\./secret\.safetensors"):
        read_checkpoint(tmp_path / "m")


def test_a_distributed_checkpoint_is_named(tmp_path):
    import torch.distributed.checkpoint as distributed

    distributed.save(network().state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(InputError, match="dcp_to_torch"):
        read_checkpoint(tmp_path / "dcp")

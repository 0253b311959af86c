"""Every implementation of the kernels writes what the specification writes, bit for bit."""

import hashlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernel_cases import (
    FORMS,
    HEAD_SIZES,
    assert_agree,
    assert_attends,
    assert_same,
    assert_turns,
    dequantized_then_sdpa,
    edge_cases,
    history,
    noise,
)

from qkvshare_agents.errors import CodecError, InvalidSetting
from qkvshare_agents.kv import codec
from qkvshare_agents.kv.codec import Encoded, encode
from qkvshare_kernels import backend, cpu, memory, plain, reference
from qkvshare_kernels.attention import PackedPages

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def library() -> backend.Kernels:
    """The CPU library; CI must be able to build it."""
    try:
        return backend.kernels(CPU, "cpu")
    except backend.KernelsUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 60, 63, 64, 65])
def test_the_library_equals_the_reference(library: backend.Kernels, form: str, tokens: int) -> None:
    for size in HEAD_SIZES:
        assert_agree(library, noise(1, tokens, size, seed=size), FORMS[form])
    for heads in (2, 3):
        assert_agree(library, noise(heads, tokens, 64), FORMS[form])
    for dtype in (torch.float16, torch.bfloat16):
        assert_agree(library, noise(8, tokens, 64, dtype), FORMS[form])


@pytest.mark.parametrize("name", edge_cases())
@pytest.mark.parametrize("form", ["keys 8 as they are", "values 8", "keys 4", "values 4", "values 3", "channels 2"])
def test_edge_cases_are_equal_too(library: backend.Kernels, name: str, form: str) -> None:
    x = edge_cases()[name]
    try:
        plain.quantize(x, **FORMS[form])
    except ValueError:
        with pytest.raises(ValueError, match="magnitudes"):
            library.quantize(x, **FORMS[form])
    else:
        assert_agree(library, x, FORMS[form])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("form", FORMS)
def test_what_fp16_cant_hold_is_refused(library: backend.Kernels, form: str, bad: float) -> None:
    x = noise(3, 64, 64).clone()
    x[-1, -1, -1, -1] = bad
    for kernels in (library, plain):
        with pytest.raises(ValueError, match="NaN, Inf or magnitudes beyond 65,504"):
            kernels.quantize(x, **FORMS[form])


def test_threads_change_nothing(library: backend.Kernels) -> None:
    x, threads = noise(3, 640, 64), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_agree(library, x, FORMS["values 4"])
        assert_agree(library, x, FORMS["keys 3"])
    finally:
        torch.set_num_threads(threads)


def test_offsets_beyond_32_bits(library: backend.Kernels) -> None:
    """A cache of 2.4 GB of which little is touched: the second layer begins 1.2 * 2**30 values after the first."""
    cache = torch.empty(2, 1, 20 * 2**20, 64, dtype=torch.float16)[:, :, -64:]
    cache.copy_(noise(1, 64, 64))
    assert_agree(library, cache, FORMS["values 8"])
    packed = library.quantize(cache, **FORMS["keys 8"])
    library.dequantize(*packed, 8, -2, cache, rotate=True)
    expected = noise(1, 64, 64)
    assert (cache.float() - expected).norm() / expected.norm() < 1e-2


def test_a_fold_is_a_sum_in_halves() -> None:
    x = torch.randn(3, 5, 7)
    halves = x.new_zeros(3, 8, 7)
    halves[:, :5] = x
    expected = (halves[:, 0] + halves[:, 4]) + (halves[:, 2] + halves[:, 6])
    expected = expected + ((halves[:, 1] + halves[:, 5]) + (halves[:, 3] + halves[:, 7]))
    assert torch.equal(reference.fold(x, 1)[:, 0], expected)


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_butterflies_are_the_hadamard_matrix(size: int) -> None:
    x = torch.randn(4, 9, size)
    exact = x.double() @ reference.hadamard(size, CPU).double()
    assert (reference.rotate(x).double() - exact).norm() / exact.norm() < 2e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 65])
def test_the_library_turns_as_torch_does(library: backend.Kernels, tokens: int, dtype: torch.dtype) -> None:
    assert_turns(library, tokens, dtype)


# attention


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 300])
def test_attention_is_dequantize_then_sdpa(library: backend.Kernels, name: str, size: int, tokens: int) -> None:
    for heads, groups in ((1, 1), (2, 3), (3, 7), (8, 1)):
        assert_attends(backend.kernels(CPU, name), size, heads, groups, tokens, torch.float32)


@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_half_precision(library: backend.Kernels, name: str, dtype: torch.dtype) -> None:
    assert_attends(backend.kernels(CPU, name), 64, 3, 3, 130, dtype)


def test_attention_over_one_side_alone(library: backend.Kernels) -> None:
    pages, query = history(2, 64, 64, [(4, 4)]), torch.randn(6, 64)
    native = [(torch.randn(2, 5, 64), torch.randn(2, 5, 64))]
    for packed, tail in ((pages, []), (PackedPages(), native)):
        expected = dequantized_then_sdpa(query, packed, tail)
        for kernels in (library, backend.kernels(CPU, "torch")):
            torch.testing.assert_close(kernels.attention(query, packed, tail, 0.125), expected, rtol=1e-4, atol=1e-5)
    for kernels in (library, backend.kernels(CPU, "torch")):
        with pytest.raises(ValueError, match="no token"):
            kernels.attention(query, PackedPages(), [], 0.125)


def test_pages_may_be_added_between_two_tokens(library: backend.Kernels) -> None:
    pages, query = history(2, 64, 128, [(4, 4)]), torch.randn(6, 64)
    library.attention(query, pages, [], 0.125)
    for keys, values in history(2, 64, 70, [(8, 8)]).pages:
        pages.append(keys, values)
    got = library.attention(query, pages, [], 0.125)
    torch.testing.assert_close(got, dequantized_then_sdpa(query, pages, []), rtol=1e-4, atol=1e-5)


def test_forms_the_library_does_not_know_are_read_all_the_same(library: backend.Kernels) -> None:
    pages = PackedPages()
    pages.append(encode(torch.randn(2, 64, 64), 4, "token"), encode(torch.randn(2, 64, 64), 4, "channel"))
    query = torch.randn(2, 64)
    got = library.attention(query, pages, [], 0.125)
    torch.testing.assert_close(got, dequantized_then_sdpa(query, pages, []), rtol=1e-4, atol=1e-5)


# which implementation runs


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_needs_neither_triton_nor_a_build(tmp_path: Path) -> None:
    code = (
        "import sys, torch; sys.modules['triton'] = None; from qkvshare_kernels import backend; "
        "print(backend.kernels(torch.device('cpu')).name, backend.library.failure)"
    )
    assert python(code, QKVSHARE_HOME=str(tmp_path), TRITON_INTERPRET="0", QKVSHARE_KERNELS="") == "torch"
    assert not list(tmp_path.iterdir())


def test_two_processes_may_build_at_once(library: backend.Kernels, tmp_path: Path) -> None:
    code = "from qkvshare_kernels import cpu; cpu.build(); print(cpu.load() is not None)"
    command = [sys.executable, "-c", code]
    env = os.environ | {"QKVSHARE_HOME": str(tmp_path)}
    children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {child.communicate(timeout=120)[0].strip() for child in children}
    assert len(outputs) == 1 and outputs.pop().endswith("True")
    assert [p.suffix for p in (tmp_path / "kernels").iterdir()] == [".so"], "nothing else is left behind"


def test_a_build_removes_what_nothing_has_loaded_for_long(library: backend.Kernels, tmp_path: Path) -> None:
    kept, old = (tmp_path / "kernels" / f"qkvshare_cpu_{name}.so" for name in ("kept", "old"))
    killed = tmp_path / "kernels" / "build_killed"
    killed.mkdir(parents=True)
    killed.parent.chmod(0o700)
    for path in (kept, old, killed / "half.o"):
        path.write_bytes(b"")
    for path in (old, killed):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    python("from qkvshare_kernels import cpu; cpu.build()", QKVSHARE_HOME=str(tmp_path))
    assert kept.exists() and not old.exists() and not killed.exists()
    assert len(list(kept.parent.iterdir())) == 2


def test_without_a_compiler_plain_torch_does_the_work(tmp_path: Path) -> None:
    code = (
        "import torch; from qkvshare_kernels import backend; cpu = torch.device('cpu'); backend.prepare(cpu); "
        "backend.library.wait(); print(backend.kernels(cpu).name); print(backend.library.failure)"
    )
    output = python(code, QKVSHARE_HOME=str(tmp_path), CXX="/nowhere/c++", QKVSHARE_KERNELS="")
    assert output.startswith("torch\nthe CPU kernels can't be built")
    with pytest.raises(AssertionError, match=r"KernelsUnavailable.*C\+\+ compiler"):
        python(code, QKVSHARE_HOME=str(tmp_path), CXX="/nowhere/c++", QKVSHARE_KERNELS="cpu")


def built(home: Path, data: bytes) -> Path:
    """A library of these bytes, under the name that they would have."""
    path = home / "kernels" / f"{cpu._stem()}_{hashlib.sha256(data).hexdigest()[:32]}.so"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_library_that_cant_be_loaded_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QKVSHARE_HOME", str(tmp_path))
    built(tmp_path, b"no library")
    fresh = backend.CpuLibrary()
    assert fresh.get() is None and "can't be loaded" in fresh.failure


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:-1] + b"?", lambda _: b""])
def test_a_damaged_library_is_never_loaded_and_built_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setenv("QKVSHARE_HOME", str(tmp_path))
    loaded: list[Path] = []
    monkeypatch.setattr(cpu, "CpuKernels", loaded.append)
    monkeypatch.setattr(cpu, "_compiled", lambda _: b"a library, as a compiler makes it")
    cpu.build()
    cpu.load()
    (path,) = (tmp_path / "kernels").iterdir()
    assert [library.name for library in loaded] == [path.name]
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert cpu.load() is None and len(loaded) == 1
    cpu.build()
    assert path.read_bytes() == whole and list((tmp_path / "kernels").iterdir()) == [path]


OPEN = {
    "mode 0777": lambda folder: folder.chmod(0o777),
    "mode 0770": lambda folder: folder.chmod(0o770),
    "a link": lambda folder: folder.rename(folder.parent / "real") and folder.symlink_to(folder.parent / "real"),
    "another user's": lambda folder: os.chown(folder, 12345, 12345),
    "a file of another user": lambda folder: os.chown(next(folder.iterdir()), 12345, 12345),
    "a file that others may write to": lambda folder: next(folder.iterdir()).chmod(0o666),
}


@pytest.mark.parametrize("expose", OPEN.values(), ids=OPEN)
def test_a_library_that_others_can_change_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expose: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("QKVSHARE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "CpuKernels", lambda path: pytest.fail(f"{path} was loaded"))
    monkeypatch.setattr(cpu, "_compiled", lambda _: pytest.fail("built where others can change it"))
    path = built(tmp_path, b"somebody's library")
    try:
        expose(path.parent)
    except PermissionError:
        pytest.skip("only root can give files away")
    fresh = backend.CpuLibrary()
    assert fresh.get() is None and "delete it" in fresh.failure
    fresh.build_behind()
    fresh.wait()
    with pytest.raises(cpu.BuildError, match="delete it"):
        fresh.build()


def test_the_directory_is_made_for_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QKVSHARE_HOME", str(tmp_path / "deep" / "home"))
    monkeypatch.setattr(cpu, "_compiled", lambda _: b"a library")
    old = os.umask(0)
    try:
        cpu.build()
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep").rglob("*")}
    assert modes.pop("home") == modes.pop("kernels") == 0o700
    assert list(modes.values()) == [0o600]


def test_what_was_asked_for_and_cant_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(backend.KernelsUnavailable, match="choose from triton, cpu, torch"):
        backend.kernels(CPU, "cuda")
    with pytest.raises(backend.KernelsUnavailable, match="don't run on meta"):
        backend.kernels(torch.device("meta"), "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(backend.KernelsUnavailable, match="triton"):
        backend.kernels(CPU, "triton")
    monkeypatch.setenv("QKVSHARE_KERNELS", "triton")
    with pytest.raises(InvalidSetting, match="triton"):
        codec.prepare(CPU)
    with pytest.raises(InvalidSetting, match="triton") as caught:
        encode(torch.zeros(1, 2, 64), 8, "token")
    assert not isinstance(caught.value, CodecError)


def test_the_name_is_what_runs(library: backend.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QKVSHARE_KERNELS", raising=False)
    assert codec.kernels_name(CPU) == "cpu"
    monkeypatch.setenv("QKVSHARE_KERNELS", "torch")
    assert codec.kernels_name(CPU) == "torch"


def test_a_build_changes_no_code(library: backend.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    x, encoded = noise(3, 64, 64), list[Encoded]()
    for name in ("torch", "cpu"):
        monkeypatch.setenv("QKVSHARE_KERNELS", name)
        encoded.append(encode(x, 4, "token", symmetric=True, rotate=True, fit=1.0))
    assert_same(encoded[0].tensors(), encoded[1].tensors())


# memory


def test_pieces_have_storages_of_their_own() -> None:
    pool = memory.Pool()
    pieces = [pool.empty((3, 1_000_001)) for _ in range(4)]
    for number, piece in enumerate(pieces):
        assert piece.untyped_storage().nbytes() == 3_000_003 and piece.data_ptr() % 64 == 0
        piece.fill_(number)
    assert [int(piece.min()) for piece in pieces] == [int(piece.max()) for piece in pieces] == [0, 1, 2, 3]
    assert pool.empty((0, 5)).shape == (0, 5) and pool.empty((9 * 2**20,)).numel() == 9 * 2**20


@pytest.mark.parametrize("shape", [(3, 0, 5), (7, 9), (2, 3 * 2**20)])
def test_memory_of_any_size_can_be_written(shape: tuple[int, ...]) -> None:
    tensor = memory.empty(shape, torch.bfloat16, CPU)
    assert tensor.shape == shape and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
    assert bool((tensor.fill_(1) == 1).all())

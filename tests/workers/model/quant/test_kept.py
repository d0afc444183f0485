"""Fitted roundings on disk: read again as they were, made anew when a file is not whole, never in the way."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.workers.model.quant.test_rounding import weights
from workers.model.quant import kept
from workers.model.quant.kept import Fitted, find_or_fit
from workers.model.quant.matrix import Quantised
from workers.model.quant.rounding import int4, int8

NAME = "model.layers.0.mlp.up_proj.weight"
ABOUT = {"revision": "sha256:1", "text": "2"}


class Fit:
    """What makes a rounding, and how often it was asked."""

    def __init__(self, seed: int = 1) -> None:
        self.weight, self.times = weights(seed, 24, 80, "normal"), 0

    def __call__(self) -> dict[str, Quantised]:
        self.times += 1
        return {NAME: int4(self.weight)}


def found(cache: Path, fit: Fit, **about: str) -> Fitted:
    return find_or_fit(cache, {**ABOUT, **about}, fit)


def dense(made: Fitted, weight: Tensor) -> Tensor:
    return made(NAME, weight).dense()


def test_it_is_made_once_for_what_it_depends_on(tmp_path: Path) -> None:
    fit = Fit()
    first, second = found(tmp_path, fit), found(tmp_path, fit)
    assert fit.times == 1
    assert first.digest == second.digest
    assert torch.equal(dense(second, fit.weight), int4(fit.weight).dense())
    found(tmp_path, fit, revision="sha256:2")
    assert fit.times == 2


def test_another_rounding_has_another_digest(tmp_path: Path) -> None:
    assert found(tmp_path, Fit(1)).digest != found(tmp_path, Fit(2), text="3").digest


def test_what_was_not_fitted_is_rounded_without_data(tmp_path: Path) -> None:
    made, other = found(tmp_path, Fit()), weights(3, 8, 64, "normal")
    assert torch.equal(made("model.layers.9.mlp.up_proj.weight", other).dense(), int4(other).dense())
    assert torch.equal(dense(made, other), int4(other).dense()), "another shape is another matrix"
    assert torch.equal(made("model.embed_tokens.weight", other).dense(), int8(other).dense())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    save_file({"x": torch.zeros(3)}, path, metadata={"columns": "[1]", "digest": "0"})


def without_words(path: Path) -> None:
    save_file({"x": torch.zeros(3)}, path)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"columns": {}, "run": print}) * 100)


@pytest.mark.parametrize("harm", [cut, flipped, empty, foreign, without_words, pickled])
def test_a_file_that_is_not_whole_is_made_anew(harm: Callable[[Path], None], tmp_path: Path) -> None:
    """security 61: nor is one of another format read."""
    fit = Fit()
    path = found(tmp_path, fit).path
    assert path is not None
    harm(path)
    assert kept.read(path) is None
    assert torch.equal(dense(found(tmp_path, fit), fit.weight), int4(fit.weight).dense())
    assert fit.times == 2
    assert kept.read(path) is not None


def test_a_disk_that_cannot_be_written_costs_the_fit_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "roundings").write_text("in the way")
    fit = Fit()
    made = found(tmp_path, fit)
    assert made.path is None
    assert [record.message for record in caplog.records] == ["rounding_not_kept"]
    assert torch.equal(dense(made, fit.weight), int4(fit.weight).dense())
    assert found(tmp_path, fit).digest == made.digest
    assert fit.times == 2


def test_many_that_want_the_same_at_once_make_it_once(tmp_path: Path) -> None:
    fit, digests = Fit(), []
    threads = [threading.Thread(target=lambda: digests.append(found(tmp_path, fit).digest)) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert fit.times == 1
    assert len(digests) == 4
    assert len(set(digests)) == 1


def test_those_used_last_stay_and_what_was_never_finished_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit()
    paths = [found(tmp_path, fit, text=str(number)).path for number in range(3)]
    old, used, _ = (path for path in paths if path is not None)
    for path, when in ((old, 1000), (used, 2000)):
        os.utime(path, (when, when))
    (old.parent / f".{old.name}.left").write_bytes(b"half")
    monkeypatch.setattr(kept, "ROOM", 3 * old.stat().st_size + 10)
    newest = found(tmp_path, fit, text="new").path
    assert not old.exists()
    assert used.exists()
    assert newest is not None
    assert sorted(path.name for path in old.parent.iterdir() if path.name.startswith(".")) == [".lock"]


def test_a_fit_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> dict[str, Quantised]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        find_or_fit(tmp_path, ABOUT, fails)
    assert [path.name for path in (tmp_path / "roundings").iterdir()] == [".lock"]
    assert found(tmp_path, Fit()).path is not None

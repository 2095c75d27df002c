# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Code that changes without its mathematics gives the losses that it gave before."""

import json

import numpy as np
import pytest

from tests.golden.recipes import FILE, RECIPES, main, run

# Another processor rounds products in another way.
RTOL = 2e-5


def test_every_recipe_is_kept():
    assert json.loads(FILE.read_text()).keys() == RECIPES.keys()


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), (["--only"], 2)])
def test_asking_for_help_records_nothing(monkeypatch, tmp_path, capsys, words, status):
    monkeypatch.setattr("tests.golden.recipes.FILE", tmp_path / "losses.json")
    monkeypatch.setattr("tests.golden.recipes.RECIPES", {})
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == status and not list(tmp_path.iterdir()) and "usage:" in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", RECIPES)
def test_losses_are_those_of_before(pool, name):
    kept, now = json.loads(FILE.read_text())[name], run(pool, name)
    assert len(now["losses"]) == 6
    for what, values in now.items():
        np.testing.assert_allclose(values, kept[what], rtol=RTOL, err_msg=what)


def test_the_eager_stream_has_the_losses_of_2bw(pool):
    """To the last bit: the same products and sums in the same order, at other times."""
    ranks, arguments = RECIPES["2bw, muon, error feedback"]
    plain, eager = (
        pool.run("tests.distributed.jobs:train", line.split(), ranks=ranks)[-1]
        for line in (arguments, arguments.replace("2bw", "2bw-eager"))
    )
    assert eager.losses == plain.losses
    assert eager.grad_norms == plain.grad_norms

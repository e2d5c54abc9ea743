"""What `save_pretrained` of a half model writes: float32, and a config that says so."""

import copy
import importlib.util
import json
import warnings

import pytest
import torch
from torch import nn

import ampatch as amp
from helpers import assert_same_bits, import_torchvision, scaled_backward
from legacy import print_in_forks

HALF = ("O2", "O3", "O5")


class Pretrained(nn.Module):
    """Saves as the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def save_pretrained(self, folder):
        dtype = next(param.dtype for param in self.parameters() if param.is_floating_point())
        folder[:] = [dtype, {value.dtype for value in self.state_dict().values()}, self.count()]

    def count(self):
        return sum(param.numel() for param in self.parameters())


class Overriding(Pretrained):
    def save_pretrained(self, folder):
        super().save_pretrained(folder)


def saved(model):
    model.save_pretrained(found := [])
    return found


@pytest.mark.exhaustive(keep=6)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("level", amp.OPT_LEVELS)
@pytest.mark.parametrize("kind", [Pretrained, Overriding])
def test_a_model_is_saved_under_the_type_of_what_is_saved(kind, level):
    before = [vars(one)["save_pretrained"] for one in (Pretrained, Overriding)]
    for _ in range(2):  # another time in the same process
        model, part = kind(), nn.Sequential(kind(), Pretrained())
        for one in (model, part):
            amp.initialize(one, opt_level=level, verbosity=0)
        for one in (model, part[0], copy.deepcopy(model)):
            assert saved(one) == [torch.float32, {torch.float32}, 6]
            assert "parameters" not in vars(one)
        amp.uninitialize()
        assert [vars(one)["save_pretrained"] for one in (Pretrained, Overriding)] == before


def test_a_half_model_of_the_users_own_is_saved_as_half():
    amp.initialize(Pretrained(), opt_level="O2", verbosity=0)
    assert saved(Pretrained().bfloat16()) == [torch.bfloat16, {torch.bfloat16}, 6]


def test_saving_that_raises_leaves_the_model_as_it_was():
    amp.initialize(model := Pretrained(), opt_level="O2", verbosity=0)
    with pytest.raises(TypeError):
        model.save_pretrained(None)
    assert "parameters" not in vars(model)


def save_and_load(folder):
    """Saves a trained model of transformers in every way there is, and reads it back."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    import_torchvision()
    import safetensors.torch
    from accelerate import Accelerator
    from transformers import BertConfig, BertForMaskedLM

    for level in HALF:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        model = BertForMaskedLM(BertConfig(vocab_size=64, **sizes))  # which ties two weights
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        tokens = torch.randint(64, (4, 8))
        scaled_backward(model(tokens, labels=tokens).loss, optimizer)
        optimizer.step()
        expected = {name: value.clone() for name, value in model.state_dict().items()}

        model.save_pretrained(folder / level)
        model.bert.save_pretrained(folder / f"{level}-part")
        for name in (level, f"{level}-part"):
            assert json.loads((folder / name / "config.json").read_text())["dtype"] == "float32"
        safetensors.torch.save_model(model, folder / level / "saved.safetensors")
        Accelerator().save_model(model, folder / f"{level}-accelerate")
        for file in folder.glob(f"{level}*/*.safetensors"):
            assert {value.dtype for value in safetensors.torch.load_file(file).values()} == {torch.float32}

        loaded = BertForMaskedLM.from_pretrained(folder / level)
        assert_same_bits(loaded.state_dict().values(), expected.values())
        amp.initialize(loaded, opt_level=level, verbosity=0)  # which takes no half model
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight.zero_()
        safetensors.torch.load_model(model, folder / level / "saved.safetensors")
        if level != "O3":  # whose masters are the half weights
            assert_same_bits(model.state_dict().values(), expected.values())
        amp.uninitialize()
    return 0


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra `trainers`")
def test_a_model_of_transformers_comes_back_as_it_was_trained(tmp_path):
    print_in_forks(lambda: save_and_load(tmp_path), [], tmp_path)

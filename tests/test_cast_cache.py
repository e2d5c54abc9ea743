"""The cast cache: one cast a weight and iteration."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch as amp
from caching import CountCasts, Tied, open_session


def test_a_weight_is_cast_once_for_several_uses_and_forwards():
    model = open_session(Tied())
    with CountCasts((5, 3)) as casts:
        (model(torch.ones(2, 3)) + model(torch.ones(2, 3))).sum()
    assert casts.count == 1


def test_a_frozen_weight_is_cast_once_as_well():
    model = open_session(Tied().requires_grad_(False))
    with CountCasts((5, 3)) as casts:
        model(torch.ones(2, 3))
        model(torch.ones(2, 3))
    assert casts.count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_weight_is_cast_once_a_forward_without_grad(mode):
    model = open_session(Tied())
    with mode(), CountCasts((5, 3)) as casts:
        model(torch.ones(2, 3))
    assert casts.count == 1


def test_a_weight_is_cast_once_an_iteration():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    counts = []
    for _ in range(3):
        with CountCasts((5, 3)) as casts:
            loss = model(torch.ones(2, 3)).sum() + model(torch.ones(2, 3)).sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(casts.count)
    assert counts == [1, 1, 1]


def test_a_weight_shared_by_two_modules_is_cast_once():
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    open_session(model)
    with CountCasts((5, 3)) as casts:
        model(torch.ones(2, 3))
    assert casts.count == 1


def test_an_input_is_not_kept_in_the_cache():
    model = open_session(Tied())
    x = torch.ones(2, 3)
    with CountCasts((2, 3)) as casts:
        model(x)
        model(x)
    assert casts.count == 2


def test_several_uses_and_forwards_add_up_to_one_gradient():
    model = open_session(Tied())
    reference = copy.deepcopy(model)
    amp.uninitialize()
    x = torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = reference(x).sum() + reference(2 * x).sum()
    loss.backward()
    open_session(model)
    (model(x).sum() + model(2 * x).sum()).backward()
    assert model.weight.grad.dtype is torch.float32
    assert torch.equal(model.weight.grad, reference.weight.grad)


def test_two_backward_passes_may_share_a_cast():
    model = open_session(Tied())
    model(torch.ones(2, 3)).sum().backward()
    first = model.weight.grad.clone()
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model.weight.grad, 2 * first)


def test_a_backward_pass_may_come_after_the_cache_was_cleared():
    model = open_session(Tied())
    losses = [model(torch.ones(2, 3)).sum(), model(torch.ones(2, 3)).sum()]
    losses[0].backward()
    amp.clear_cache()
    losses[1].backward()
    assert model.weight.grad is not None


def test_a_graph_that_is_retained_gives_the_same_gradient_again():
    model = open_session(Tied())
    loss = model(torch.ones(2, 3)).sum()
    first = torch.autograd.grad(loss, model.weight, retain_graph=True)[0]
    second = torch.autograd.grad(loss, model.weight)[0]
    assert torch.equal(first, second)


def count_casts(run, shape=(5, 3), times=2):
    """How often a weight is cast in each of several iterations."""
    counts = []
    for _ in range(times):
        with CountCasts(shape) as casts:
            run()
        counts.append(casts.count)
    return counts


def test_accumulated_gradients_share_one_cast_of_a_weight():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        for _ in range(3):
            with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert count_casts(iterate) == [1, 1]


def test_a_generator_is_cast_once_and_its_discriminator_once_for_each_of_its_two_losses():
    generator, discriminator = Tied(), nn.Linear(3, 7, bias=False)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, discriminator)]
    open_session([generator, discriminator], optimizers, num_losses=2)

    def iterate():
        fake = generator(torch.ones(2, 3))
        loss = discriminator(fake.detach()).sum() + discriminator(torch.ones(2, 3)).sum()
        with amp.scale_loss(loss, optimizers[1], loss_id=0) as scaled:
            scaled.backward()
        optimizers[1].step()
        with amp.scale_loss(discriminator(fake).sum(), optimizers[0], loss_id=1) as scaled:
            scaled.backward()
        optimizers[0].step()

    assert count_casts(iterate) == [1, 1]
    assert count_casts(iterate, (7, 3)) == [2, 2]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_casts_a_weight_once(reentrant):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    x = torch.ones(2, 3, requires_grad=True)

    def iterate():
        loss = checkpoint(model, x, use_reentrant=reentrant).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    assert count_casts(iterate) == [1, 1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_between_two_forwards_of_an_iteration_costs_no_cast(mode):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        loss = model(torch.ones(2, 3)).sum()
        with mode():
            model(torch.ones(2, 3))
        loss = loss + model(torch.ones(2, 3)).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    assert count_casts(iterate) == [1, 1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_of_many_batches_costs_one_cast_which_the_next_iteration_uses(mode):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        for _ in range(3):
            with mode():
                model(torch.ones(2, 3))
        with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert count_casts(iterate) == [1, 1]
    assert model.weight.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_frozen_backbone_is_cast_once_a_forward_before_a_head_that_trains(mode):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = Tied().requires_grad_(False), nn.Linear(3, 2)

        def forward(self, x):
            with mode():
                features = self.backbone(x) + self.backbone(2 * x)
            return self.head(features.clone())

    model = Frozen()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    assert count_casts(iterate) == [1, 1]

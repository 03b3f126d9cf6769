"""Layers that see the time, the field for images, and controls of very many weights."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pyro_sde import MLPControl
from pyro_sde.nn import ConcatConv2d, ConcatConvTranspose2d, ConcatLinear, ConvField

T = 0.3


def with_time(h, dim, t=T):
    shape = list(h.shape)
    shape[dim] = 1
    return torch.cat([torch.full(shape, t), h], dim)


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 4, 5)])
def test_linear_is_a_layer_of_time_and_input(shape, bias):
    layer, h = ConcatLinear(5, 3, bias=bias), torch.randn(shape)
    assert layer.weight.shape == (3, 6) and (layer.bias is None) == (not bias)
    assert_close(layer(T, h), F.linear(with_time(h, -1), layer.weight, layer.bias))


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"bias": False}])
@pytest.mark.parametrize("shape", [(5, 6, 7), (2, 5, 6, 7)])
def test_convolution_is_a_layer_of_time_and_input(shape, options):
    layer, h = ConcatConv2d(5, 3, 3, **options), torch.randn(shape)
    assert layer.weight.shape == (3, 6, 3, 3)
    kwargs = {k: v for k, v in options.items() if k != "bias"}
    expected = F.conv2d(with_time(h, -3), layer.weight, layer.bias, **kwargs)
    assert_close(layer(T, h), expected)


@pytest.mark.parametrize("size", [(11, 13), (12, 14), (11, 14)])
def test_transposed_convolution_is_a_layer_of_time_and_input(size):
    """``output_size`` takes what ``output_padding`` would add."""
    layer, h = ConcatConvTranspose2d(5, 3, 3, stride=2, padding=1), torch.randn(2, 5, 6, 7)
    assert layer.weight.shape == (6, 3, 3, 3)
    extra = (size[0] - 11, size[1] - 13)
    expected = F.conv_transpose2d(
        with_time(h, -3), layer.weight, layer.bias, stride=2, padding=1, output_padding=extra
    )
    assert_close(layer(T, h, size), expected)
    if extra == (0, 0):
        assert_close(layer(T, h), expected)


LAYERS = {
    "linear": (lambda: ConcatLinear(2, 2), (3, 2)),
    "convolution": (lambda: ConcatConv2d(2, 2, 3, padding=1), (3, 2, 4, 4)),
    "transposed": (lambda: ConcatConvTranspose2d(2, 2, 3, padding=1), (3, 2, 4, 4)),
    "field": (lambda: ConvField(2, hidden=3), (3, 2, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_time_makes_a_difference_as_number_or_tensor(name):
    make, shape = LAYERS[name]
    layer, h = make(), torch.randn(shape)
    assert torch.equal(layer(0.3, h), layer(torch.tensor(0.3), h))
    assert (layer(0.3, h) != layer(0.4, h)).all()
    single = layer.float()
    assert single(torch.tensor(0.3), h.float()).dtype == torch.float32


@pytest.mark.parametrize("activation", ["tanh", "softplus"])
@pytest.mark.parametrize("size", [(7, 7), (8, 8), (1, 1), (5, 2), (2, 9)])
def test_conv_field_keeps_the_shape_and_is_its_four_layers(size, activation):
    field, h = ConvField(3, hidden=4, activation=activation), torch.randn(2, 3, *size)
    act = torch.tanh if activation == "tanh" else lambda x: torch.log1p(x.exp())
    out = field(T, h)
    assert out.shape == h.shape
    p = dict(field.named_parameters())
    g = act(F.conv2d(with_time(h, 1), p["first.weight"], p["first.bias"], padding=1))
    g = act(F.conv2d(with_time(g, 1), p["down.weight"], p["down.bias"], stride=2, padding=1))
    assert g.shape[-2:] == tuple(math.ceil(n / 2) for n in size)
    even = [1 - n % 2 for n in size]
    g = act(
        F.conv_transpose2d(
            with_time(g, 1), p["up.weight"], p["up.bias"], 2, padding=1, output_padding=even
        )
    )
    expected = F.conv2d(with_time(g, 1), p["last.weight"], p["last.bias"], padding=1)
    assert_close(out, expected)


def test_conv_field_sizes():
    channels = {name: m.in_channels for name, m in ConvField(3).named_modules() if name}
    assert channels == {"first": 4, "down": 33, "up": 33, "last": 33}
    with pytest.raises(ValueError, match=r"one of \['softplus', 'tanh'\]: found 'relu'"):
        ConvField(3, activation="relu")


@pytest.mark.parametrize("dim", [10**3, 10**4, 10**5, 10**6])
def test_the_control_of_a_network_is_linear_in_its_weights(dim):
    """Two inputs, two outputs and a bias a weight; hidden (2, 128, 2) and 33 features of time."""
    control = MLPControl(dim)
    layers = 2 * 128 + 128 * 2
    biases = (33 + 1) * (2 + 128 + 2)
    assert sum(p.numel() for p in control.parameters()) == 5 * dim + layers + biases
    with torch.no_grad():
        w = torch.randn(dim)
        u = control(torch.tensor([0.5]), w)
        assert u.shape == (dim,) and (u == 0).all()
        nn.init.ones_(control.last.weight)
        assert (control(torch.tensor([0.5]), w) != 0).all()


def test_the_bottleneck_starts_above_512_weights():
    def widths(dim, **options):
        control = MLPControl(dim, **options)
        return [layer.out_features for layer in control.layers], control.last.out_features

    assert widths(512) == ([64, 64], 512) and widths(513) == ([2, 128, 2], 513)
    assert widths(513, contraction=True) == ([2, 128, 2], 1026)
    assert widths(513, hidden=(7,)) == ([7], 513)
    assert MLPControl(600, times=torch.linspace(0, 1, 21)).embedding.shape == (20, 16)

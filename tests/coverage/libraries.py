"""Hold memopt against eager on small models of public libraries, as their users write the step, and print a table.

    python tests/coverage/libraries.py [--only NAME ...] [--budget 0.8] [--write docs/results/libraries.md]

A case whose library is not installed is left out, and named. A page that exists keeps the rows of what is not run.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import check  # noqa: E402
import run  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

Made = tuple[nn.Module, Callable[..., torch.Tensor], Callable[[], tuple]]  # a model, its loss of a batch, batches
CASES: dict[str, tuple[str, Callable[[], Made]]] = {}


def case(library: str) -> Callable:
    """A case of this name on a package index; its model is made by the function."""
    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        CASES[make.__name__.replace("_", " ")] = (library, make)
        return make

    return keep


def tokens(shape: tuple, kinds: int = 40) -> torch.Tensor:
    return torch.randint(kinds, shape)


@case("x-transformers")
def decoder_with_rotary_positions() -> Made:
    library = importlib.import_module("x_transformers")
    layers = library.Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, attn_dropout=0.1, ff_glu=True)
    model = library.TransformerWrapper(num_tokens=40, max_seq_len=16, attn_layers=layers)
    return model, lambda x: F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:]), lambda: (tokens((2, 17)),)


@case("x-transformers")
def vision_encoder() -> Made:
    library = importlib.import_module("x_transformers")
    model = library.ViTransformerWrapper(image_size=16, patch_size=4, num_classes=5,
                                         attn_layers=library.Encoder(dim=32, depth=2, heads=4))
    return model, lambda x, y: F.cross_entropy(model(x), y), lambda: (torch.randn(2, 3, 16, 16), tokens((2,), 5))


@case("vector-quantize-pytorch")
def finite_scalar_quantization() -> Made:
    library = importlib.import_module("vector_quantize_pytorch")
    model = nn.ModuleList([nn.Linear(8, 3), library.FSQ([4, 4, 3]), nn.Linear(3, 8)])
    return (model, lambda x: (model[2](model[1](model[0](x))[0]) - x).square().mean(),
            lambda: (torch.randn(2, 12, 8),))


@case("vector-quantize-pytorch")
def vector_quantization() -> Made:
    library = importlib.import_module("vector_quantize_pytorch")
    model = nn.ModuleList([nn.Linear(8, 16), library.VectorQuantize(dim=16, codebook_size=32), nn.Linear(16, 8)])

    def loss(x: torch.Tensor) -> torch.Tensor:
        found, _, commitment = model[1](model[0](x))
        return (model[2](found) - x).square().mean() + commitment.sum()

    return model, loss, lambda: (torch.randn(2, 12, 8),)


def graphs(name: str, **settings: Any) -> Made:
    layer = functools.partial(getattr(importlib.import_module("torch_geometric.nn"), name), **settings)
    model = nn.ModuleList([layer(8, 16), layer(16, 4)])
    batches = iter(range(100))

    def loss(x: torch.Tensor, edges: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model[1](model[0](x, edges).relu(), edges), y)

    def batch() -> tuple:
        nodes = 20 + 3 * next(batches)
        return torch.randn(nodes, 8), torch.randint(nodes, (2, 3 * nodes)), tokens((nodes,), 4)

    return model, loss, batch


@case("torch_geometric")
def GCN_of_graphs_of_many_sizes() -> Made:
    return graphs("GCNConv")


@case("torch_geometric")
def GraphSAGE_of_graphs_of_many_sizes() -> Made:
    return graphs("SAGEConv")


@case("torch_geometric")
def GAT_of_graphs_of_many_sizes() -> Made:
    return graphs("GATConv", heads=2, concat=False)


@case("einops")
def layers_in_a_convolutional_network() -> Made:
    library = importlib.import_module("einops.layers.torch")
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), library.Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2),
        nn.Linear(32, 16), library.EinMix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=16, d=12),
        library.Reduce("b t c -> b c", "mean"), nn.Linear(12, 4))
    return model, lambda x, y: F.cross_entropy(model(x), y), lambda: (torch.randn(2, 3, 8, 8), tokens((2,), 4))


@case("pytorch-metric-learning")
def ArcFace() -> Made:
    criterion = importlib.import_module("pytorch_metric_learning.losses").ArcFaceLoss(num_classes=3, embedding_size=6)
    model = nn.ModuleList([nn.Linear(8, 6), criterion])
    return model, lambda x, y: criterion(model[0](x), y), lambda: (torch.randn(12, 8), tokens((12,), 3))


@case("pytorch-metric-learning")
def triplet_loss_of_hard_pairs() -> Made:
    criterion = importlib.import_module("pytorch_metric_learning.losses").TripletMarginLoss()
    miner = importlib.import_module("pytorch_metric_learning.miners").BatchHardMiner()
    model = nn.Linear(8, 6)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = model(x)
        return criterion(found, y, miner(found, y))

    return model, loss, lambda: (torch.randn(12, 8), tokens((12,), 3))


@case("kornia")
def losses_of_images() -> Made:
    losses = importlib.import_module("kornia").losses
    model = nn.Conv2d(3, 3, 3, padding=1)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = model(x)
        return losses.dice_loss(found, y) + losses.focal_loss(found, y, alpha=0.5, reduction="mean") + losses.ssim_loss(
            found.sigmoid(), x.sigmoid(), 5) + losses.lovasz_softmax_loss(found, y)

    return model, loss, lambda: (torch.randn(2, 3, 12, 12), tokens((2, 12, 12), 3))


@case("peft")
def LoRA_of_GPT2() -> Made:
    transformers, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    small = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, loss_type="ForCausalLM")
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(small), peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)).double()
    return model, lambda x: model(input_ids=x, labels=x).loss, lambda: (tokens((2, 12)),)


@case("torchdiffeq")
def neural_ODE_by_Runge_Kutta() -> Made:
    solve, times = importlib.import_module("torchdiffeq").odeint, torch.linspace(0, 1, 3)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    return (model, lambda y: solve(lambda t, y: model(y), y, times, method="rk4")[-1].square().mean(),
            lambda: (torch.randn(4, 2),))


@case("tensordict")
def modules_in_sequence() -> Made:
    data, parts = importlib.import_module("tensordict"), importlib.import_module("tensordict.nn")
    model = parts.TensorDictSequential(parts.TensorDictModule(nn.Linear(8, 16), ["x"], ["hidden"]),
                                       parts.TensorDictModule(nn.Linear(16, 4), ["hidden"], ["out"]))
    return (model, lambda x, y: F.cross_entropy(model(data.TensorDict({"x": x}, [6]))["out"], y),
            lambda: (torch.randn(6, 8), tokens((6,), 4)))


@case("monai")
def segmentation_by_Dice() -> Made:
    nets, losses = importlib.import_module("monai.networks.nets"), importlib.import_module("monai.losses")
    model = nets.UNet(2, 1, 3, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, dropout=0.1)
    criterion = losses.DiceCELoss(to_onehot_y=True, softmax=True)
    return model, lambda x, y: criterion(model(x), y), lambda: (torch.randn(2, 1, 32, 32), tokens((2, 1, 32, 32), 3))


@case("diffusers")
def diffusion_of_images() -> Made:
    library = importlib.import_module("diffusers")
    model = library.UNet2DModel(sample_size=16, layers_per_block=1, block_out_channels=(32, 32), norm_num_groups=8,
                                down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
    schedule = library.DDPMScheduler(num_train_timesteps=100)

    def loss(x: torch.Tensor) -> torch.Tensor:
        noise, when = torch.randn_like(x), tokens((len(x),), 100)
        return F.mse_loss(model(schedule.add_noise(x, noise, when), when).sample, noise)

    return model, loss, lambda: (torch.randn(2, 3, 16, 16),)


@case("timm")
def densely_connected_convolutions() -> Made:
    model = importlib.import_module("timm").create_model("densenet121", num_classes=5)
    return model, lambda x, y: F.cross_entropy(model(x), y), lambda: (torch.randn(2, 3, 64, 64), tokens((2,), 5))


@case("segmentation-models-pytorch")
def two_losses_of_one_network() -> Made:
    library = importlib.import_module("segmentation_models_pytorch")
    model, dice = library.Unet("resnet18", encoder_weights=None, classes=3), library.losses.DiceLoss("multiclass")
    return (model, lambda x, y: dice(model(x), y) + F.cross_entropy(model(x), y),
            lambda: (torch.randn(2, 3, 64, 64), tokens((2, 64, 64), 3)))


@case("lightly")
def contrast_of_two_views() -> Made:
    model = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))
    criterion = importlib.import_module("lightly.loss").NTXentLoss()
    return model, lambda x, y: criterion(model(x), model(y)), lambda: (torch.randn(6, 48), torch.randn(6, 48))


def training(make: Callable[[], Made]) -> check.Training:
    model, loss, batch = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trained, lr=1e-3)

    def step(*given: torch.Tensor) -> torch.Tensor:
        value = loss(*given)
        value.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        opt.step()
        opt.zero_grad()
        return value

    return check.Training(step, [model], [opt], lambda i: batch())


def row(name: str, budget: float | None) -> list[str]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    library, make = CASES[name]
    found = check.run(check.Case(name, functools.partial(training, make), steps=6))
    wrong = "" if found.right else f"; **{found.error or found.where}**"
    kept = ""
    if budget and found.whole:
        under = check.run(check.Case(name, functools.partial(training, make), steps=6), memory_budget=budget)
        refused = under.error.startswith("InfeasibleBudget")
        wrong += "" if under.right or refused else f"; **under the budget: {under.error or under.where}**"
        kept = "refused" if refused else f"{under.peak / found.eager_peak:.2f}"
    way = "whole" if found.whole else "ordinary path: " + " ".join(found.reasons[:1])
    return [library, metadata.version(library), name, way.replace("|", "\\|"), run.number(found.difference) + wrong,
            f"{found.peak / found.eager_peak:.2f}" if found.peak else "-", kept]


HEADER = f"""# Public libraries

Generated by `python tests/coverage/libraries.py --budget 0.8 --write docs/results/libraries.md` with torch {torch.__version__}
on a CPU: small models of each library trained for six steps (AdamW, gradients clipped) by eager and by memopt on its
eager lowering, in float64 from equal seeds. A difference is the largest of any loss, parameter, buffer, gradient,
optimizer state or random state, relative to the tensor's largest value. Peaks are of one step, as a share of eager's;
the last is under a budget of 0.8 of the captured step's own peak, which is refused where no plan keeps it.
"""
COLUMNS = ("library", "version", "what is trained", "captured", "largest difference", "peak / eager's", "under a budget")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", help="libraries or cases")
    parser.add_argument("--budget", type=float, help="also under this share of the captured step's peak")
    parser.add_argument("--write", type=Path, help="keep the table in this file")
    given = parser.parse_args()
    lines = given.write.read_text().splitlines() if given.write and given.write.exists() else []
    table = {cells[2]: cells for line in lines if line.startswith("| ")
             for cells in [[cell.strip() for cell in line.strip("|").split(" | ")]] if cells[2] in CASES}
    for name, (library, _) in CASES.items():
        if given.only and not {name, library} & set(given.only):
            continue
        try:
            metadata.version(library)
        except metadata.PackageNotFoundError:
            print(f"{name}: {library} is not installed", flush=True)
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            table[name] = pool.apply(row, (name, given.budget))
        print(*table[name], sep="  ", flush=True)
        if given.write:
            ordered = [table[each] for each in CASES if each in table]
            rows = ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *ordered)]
            given.write.write_text("\n".join([HEADER, *rows, ""]))


if __name__ == "__main__":
    main()

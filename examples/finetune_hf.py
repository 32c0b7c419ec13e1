"""Train Hugging Face models, small and from their configuration, on Shakespeare's plays."""

from __future__ import annotations

import argparse
import sys

import torch
import transformers
from common import arguments, compiled, train
from data import random_batch, shakespeare
from torch import nn

from memopt_compile.bench import answer, compare


def build(name: str, vocabulary: int, width: int, layers: int) -> nn.Module:
    """A model with random parameters that gives `.loss` when called with labels."""
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width,
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2))
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=4, n_positions=128))
        model.loss_type = "ForCausalLM"  # Else its forward warns, which splits the graph.
        return model
    return transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=4))


def parse() -> argparse.Namespace:
    parser = arguments("Train Hugging Face models on Shakespeare's plays.", steps=150)
    parser.add_argument("--model", choices=("llama", "gpt2", "bert"), default="llama")
    options = parser.parse_args()
    options.steps = min(options.steps, 20) if options.quick else options.steps
    return options


def main() -> None:
    options = parse()
    sequence, width, layers = (32, 32, 2) if options.quick else (96, 128, 4)
    ids, _, alphabet = shakespeare()
    mask = len(alphabet)  # One token more than there are characters, for bert.
    torch.manual_seed(options.seed)
    model = build(options.model, len(alphabet) + 1, width, layers).train()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(tokens, labels):
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss

    generator = torch.Generator().manual_seed(options.seed)

    def batch(i: int):
        tokens, _ = random_batch(ids, 8, sequence, generator)
        if options.model != "bert":
            return tokens, tokens  # The model shifts the labels itself.
        hidden = torch.rand(tokens.shape, generator=generator) < 0.15
        return tokens.masked_fill(hidden, mask), tokens.masked_fill(~hidden, -100)

    step = compiled(step, options)
    if options.measure:
        return answer(step, batch(0), options.measure, (model, opt))
    print(f"{options.model}, {sum(p.numel() for p in model.parameters()):,} parameters")
    train(step, batch, options.steps)
    if options.compare:
        compare([sys.executable, *sys.argv], svg=options.svg)


if __name__ == "__main__":
    main()

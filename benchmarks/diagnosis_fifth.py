"""The fifth set of the diagnosis: networks, tasks and faults of none of the sets before, held out.

    python benchmarks/diagnosis_fifth.py --out /tmp/fifth            # trains, and prints what was said of each run
    python benchmarks/diagnosis_fifth.py --out /tmp/fifth --judge    # judges the folders again
    python benchmarks/diagnosis_fifth.py --scores                    # trains the healthy runs; says only how well

Written by somebody who had not written the rules, and committed before any of these runs was judged.
"""

import torch
from torch import nn

import diagnosis_fifth_networks as of
from diagnosis_loop import Base, Lion, by, main, makers

SGD, Adam, AdamW, RMSprop = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
momentum = by(SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
BASES = {
    "friedman": Base(of.friedman, of.dense(10, 64, 64, 1), by(RMSprop, lr=2e-3), {"batch": 32}),
    "gaussian": Base(of.friedman, of.dense(10, 48, 48, 2, act=nn.Tanh), by(Adam, lr=3e-3), {}, of.gaussian),
    "poisson": Base(of.counts, of.dense(6, 32, 32, 1, act=nn.SiLU), by(AdamW, lr=3e-3), {}, of.poisson),
    "resnet": Base(of.images, of.ResNet, momentum, {"steps": 200}),
    "depthwise": Base(of.images, of.depthwise, by(Adam, lr=3e-3), {"steps": 200}),
    "reader": Base(of.sentences, of.Reader, by(AdamW, lr=3e-3, weight_decay=0.1),
                   {"steps": 200, "batch": 32, "cosine": True, "warmup": 20, "clip": 1.0}),
    "listener": Base(of.tones, of.Listener, by(Adam, lr=1e-2), {"batch": 50, "steps": 200}),
    "auto": Base(of.same_as_inputs, of.dense(64, 32, 8, 32, 64, act=nn.LeakyReLU), by(Adam, lr=3e-3), {}),
    "variational": Base(of.same_as_inputs, of.Variational, by(Adam, lr=3e-3), {}),
    "tags": Base(of.tags, of.dense(20, 64, 64, 12, act=nn.ReLU), by(SGD, lr=0.2, momentum=0.9), {}),
    "words": Base(of.reviews, of.Words, by(Adam, lr=5e-3), {}),
    "tagger": Base(of.brackets, of.Tagger, by(AdamW, lr=1e-2), {"batch": 32}),
    "views": Base(of.two_views, of.dense(64, 48, 16, act=nn.ReLU), by(Adam, lr=2e-3), {"batch": 64}, of.contrast),
    "teacher": Base(of.teacher, of.dense(64, 32, 10, act=nn.ReLU), by(AdamW, lr=5e-3), {}, of.matched),
    "game": Base(of.real_or_noise, of.dense(64, 48, 48, 1, act=nn.LeakyReLU), by(Adam, lr=1e-3, betas=(0.5, 0.999)),
                 {"opponent": of.Forger, "batch": 48}),
    "adapted": Base(of.flat, of.Adapted, by(AdamW, lr=3e-3), {}),
    "experts": Base(of.flat, of.Experts, by(Adam, lr=3e-3), {}),
    "mlp": Base(of.flat, of.dense(64, 64, 64, 10, act=nn.ReLU), by(Adam, lr=2e-3), {}),
}  # fmt: skip
broken, sound = makers(BASES)
DIVERGED, INIT = "lr_too_large", "exploding_signals saturated_units"
FAULTS = [
    broken("friedman", "RMSprop at 1e-7", "lr_too_small", by(RMSprop, lr=1e-7)),
    broken("friedman", "RMSprop at 0.5", DIVERGED, by(RMSprop, lr=0.5)),
    broken("friedman", "targets of 1,000 y + 5,000", "targets_not_normalized", targets=True),
    broken("friedman", "one column in units 10,000 times smaller", "inputs_not_normalized", column=1e4),
    broken("friedman", "NaN in one example", "not_a_number", nan=True),
    broken("friedman", "zero_grad between backward and step", "lr_too_small frozen_layer vanishing_signals",
           zero_before_step=True),
    broken("gaussian", "raw targets of 1,000 y + 5,000", "targets_not_normalized", targets=True),
    broken("gaussian", "half of the training targets shuffled", "labels", shuffle=0.5),
    broken("poisson", "SGD at 3", DIVERGED, by(SGD, lr=3.0, momentum=0.9)),
    broken("poisson", "48 training examples", "memorization", by(Adam, lr=1e-2), train_examples=48, batch=48),
    broken("resnet", "in evaluation mode from the start", "wrong_mode", evaluation=True),
    broken("resnet", "loss summed over the batch", DIVERGED, reduction="sum"),
    broken("resnet", "weight decay 0.5", "weight_decay_too_strong", by(SGD, lr=0.05, momentum=0.9, weight_decay=0.5)),
    broken("resnet", "60 % of the training labels shuffled", "labels", shuffle=0.6),
    broken("resnet", "batches of 2", "batch_too_small", batch=2),
    broken("resnet", "no training example of class 7", "class_missing", without=7),
    broken("resnet", "the stem frozen", "frozen_layer", frozen="stem"),
    broken("resnet", "detached after the stem", "frozen_layer", cut=True),
    broken("depthwise", "no zero_grad", "gradients_not_zeroed", keep=True),
    broken("depthwise", "biases of -6", "dead_units", bias=-6.0),
    broken("depthwise", "examples sorted by class", "classes_in_order", sorted=True),
    broken("depthwise", "pixels from 0 to 4,000", "inputs_not_normalized", pixels=4000.0),
    broken("depthwise", "softmax as the last layer", "softmax_twice", end=nn.Softmax(-1)),
    broken("depthwise", "a layer not in the optimiser", "not_in_optimizer", left="4."),
    broken("depthwise", "gradients clipped to 1e-4", "clipping_always", by(SGD, lr=0.1, momentum=0.9), clip=1e-4),
    broken("reader", "AdamW at 0.3", DIVERGED, by(AdamW, lr=0.3, weight_decay=0.1)),
    broken("reader", "the words' embedding frozen", "frozen_layer", frozen="words"),
    broken("reader", "targets of another sentence", "labels memorization", other_sentence=True),
    broken("reader", "six attentions without skips", "oversmoothing rank_collapse vanishing_signals",
           depth=6, skip=False),
    broken("reader", "dropout 0.9", "dropout_too_strong", dropout=0.9),
    broken("reader", "a warm-up of 1,000,000 steps", "lr_too_small", warmup=1_000_000),
    broken("reader", "weights 10 times too large", INIT, scale=10.0),
    broken("reader", "the same batch always", "memorization", same=True, batch=8, cosine=False),
    broken("listener", "weights 10 times too large", INIT, scale=10.0),
    broken("listener", "Adam at 1", "lr_too_large saturated_units", by(Adam, lr=1.0)),
    broken("listener", "no zero_grad", "gradients_not_zeroed", keep=True),
    broken("listener", "a body that learns 100,000 times slower than the head", "head_only", body=1e-5),
    broken("listener", "batches of one", "batch_too_small", batch=1),
    broken("auto", "sigmoids, as deep as before", "vanishing_signals saturated_units rank_collapse", act=nn.Sigmoid),
    broken("auto", "equal weights in every unit", "rank_collapse", constant=True),
    broken("auto", "weights in bfloat16, SGD at 1e-3", "half_precision", by(SGD, lr=1e-3), dtype=torch.bfloat16),
    broken("auto", "weight decay 100", "weight_decay_too_strong", by(AdamW, lr=3e-3, weight_decay=100.0)),
    broken("tags", "sigmoid before the loss with logits", "softmax_twice", twice=True),
    broken("tags", "momentum 0.999", "momentum_too_large", by(SGD, lr=0.2, momentum=0.999)),
    broken("tags", "no activation", "no_activation", linear=True),
    broken("tags", "every 30th batch 100 times too large", "loss_spikes", by(Adam, lr=1e-3), spikes=30),
    broken("words", "a probe of one class", "constant_probe", one=True),
    broken("words", "a third of the probe twice", "doubled_examples", copies=3),
    broken("words", "40 training examples", "memorization", train_examples=40, batch=40, dropout=0.0),
    broken("words", "cosine schedule of 10 steps", "lr_too_small", by(Adam, lr=1e-3), cosine=10, warmup=1),
    broken("tagger", "half of the training labels shuffled", "labels", shuffle=0.5),
    broken("views", "SGD at 1,000", DIVERGED, by(SGD, lr=1000.0, momentum=0.9)),
    broken("teacher", "outputs times 300, SGD at 1e-5", "lazy", by(SGD, lr=1e-5), end=of.Times(300.0)),
    broken("adapted", "the head not in the optimiser", "not_in_optimizer", left="head"),
    broken("mlp", "labels of the training examples one too high", "labels", shift=1),
]  # fmt: skip

HEALTHY = [
    sound("friedman"), sound("friedman", "Adam", by(Adam, lr=3e-3)),
    sound("friedman", "much noise in the targets", by(Adam, lr=1e-3), spread=6.0),
    sound("friedman", "Adagrad, GELU", by(torch.optim.Adagrad, lr=0.03), act=nn.GELU),
    sound("gaussian"), sound("gaussian", "SGD, clipped to 1", by(SGD, lr=0.02, momentum=0.9), clip=1.0),
    sound("poisson"), sound("poisson", "Lion", by(Lion, lr=5e-4)),
    sound("resnet"), sound("resnet", "cosine, Nesterov, smoothed labels",
                           by(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4), cosine=True, smoothing=0.1),
    sound("resnet", "group norm, AdamW", by(AdamW, lr=3e-3), groups=True),
    sound("resnet", "bfloat16 autocast", autocast=True),
    sound("resnet", "mixed-up examples", mixup=True),
    sound("resnet", "four batches of 16 accumulated", batch=16, accumulate=4),
    sound("depthwise"), sound("depthwise", "RMSprop", by(RMSprop, lr=1e-3)),
    sound("depthwise", "hard swish, Lion", by(Lion, lr=2e-3), act=nn.Hardswish),
    sound("depthwise", "noise in the inputs", noise=0.5),
    sound("depthwise", "wide, SGD", by(SGD, lr=0.1, momentum=0.9), width=32),
    sound("reader"), sound("reader", "no clipping, no schedule", by(Adam, lr=2e-3), clip=1e9, cosine=False, warmup=1),
    sound("reader", "dropout 0.1, three blocks", dropout=0.1, depth=3),
    sound("reader", "bfloat16 autocast", autocast=True), sound("reader", "Lion", by(Lion, lr=1e-3, weight_decay=0.3)),
    sound("listener"), sound("listener", "GRU", gru=True),
    sound("listener", "two cells, clipped to 1", cells=2, clip=1.0),
    sound("listener", "RMSprop", by(RMSprop, lr=3e-3)),
    sound("auto"), sound("auto", "tanh, code of 8", act=nn.Tanh),
    sound("auto", "NAdam", by(torch.optim.NAdam, lr=3e-3)),
    sound("variational"), sound("variational", "momentum", by(SGD, lr=0.3, momentum=0.9)),
    sound("tags"), sound("tags", "Adam, dropout 0.3", by(Adam, lr=3e-3), dropout=0.3),
    sound("tags", "batch norm", norm=True), sound("tags", "weight norm", by(Adam, lr=3e-3), weight_norm=True),
    sound("words"), sound("words", "momentum", by(SGD, lr=0.5, momentum=0.9)),
    sound("words", "batches of 16", batch=16),
    sound("tagger"), sound("tagger", "Adamax, cosine", by(torch.optim.Adamax, lr=1e-2), cosine=True),
    sound("views"), sound("views", "momentum", by(SGD, lr=0.3, momentum=0.9)),
    sound("teacher"), sound("teacher", "RMSprop", by(RMSprop, lr=2e-3)),
    sound("game"), sound("game", "dropout 0.3", dropout=0.3),
    sound("adapted"), sound("adapted", "momentum", by(SGD, lr=0.1, momentum=0.9)),
    sound("experts"), sound("experts", "AdamW, smoothed labels", by(AdamW, lr=3e-3, weight_decay=0.1), smoothing=0.1),
    sound("mlp"), sound("mlp", "goes on from a trained network", by(Adam, lr=3e-4), pretrained=150),
    sound("mlp", "goes on from a finished network", by(Adam, lr=1e-4), pretrained=400),
    sound("mlp", "fine-tuned on a third of the examples", by(SGD, lr=0.01, momentum=0.9),
          pretrained=60, train_examples=400),
]  # fmt: skip

if __name__ == "__main__":
    main(FAULTS, HEALTHY, __doc__)

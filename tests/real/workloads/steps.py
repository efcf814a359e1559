"""Computes the same again and again with a framework, and says whether the result is what it was at first: `steps.py NAME SECS`.

One JSON line when there is a first result (or `skipped`: why there is none, or that it differs by itself from round to round), and
one every 0.1 s: how many were computed, and whether all of them were equal, bit by bit; if not, `changed`: the first round that was
not, how many of its results were not, how many rounds were not until now, and the longest round until that one, in seconds: one
during which the process was suspended is longer than any other.
"""

import fractions
import hashlib
import itertools
import json
import os
import sys
import time

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The least of a GPU that is enough, as several of these share one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


class Skip(Exception):
    """This framework cannot run here."""


def torch_():
    import torch

    torch.manual_seed(0)
    values = torch.randn(1024, 1024, device="cuda")
    return torch.__version__, lambda: (values @ values).cpu().numpy().tobytes()


def graph():
    import torch

    torch.manual_seed(0)
    values = torch.randn(1024, 1024, device="cuda")
    captured, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            values @ values
    torch.cuda.current_stream().wait_stream(aside)
    with torch.cuda.graph(captured):
        product = values @ values

    def step():
        captured.replay()
        return product.cpu().numpy().tobytes()

    return torch.__version__, step


def compile_():
    import torch

    torch.manual_seed(0)
    values = torch.randn(1024, 1024, device="cuda")
    compiled = torch.compile(lambda given: (given * 2 + 1).relu().sum(dim=1))
    return torch.__version__, lambda: compiled(values).cpu().numpy().tobytes()


def jax_():
    import jax

    if jax.default_backend() != "gpu":
        raise Skip(f"jax {jax.__version__} finds no GPU")
    values = jax.random.normal(jax.random.key(0), (1024, 1024))
    product = jax.jit(lambda given: given @ given)
    return jax.__version__, lambda: jax.device_get(product(values)).tobytes()


def cupy_():
    import cupy

    values = cupy.arange(1 << 20, dtype=cupy.float32).reshape(1024, 1024) % 7 - 3.3
    return cupy.__version__, lambda: cupy.asnumpy(values @ values).tobytes()


def tokens():
    """Generates 24 tokens with a small GPT-2 of random weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval().to("cuda")
    prompt = torch.tensor([[5, 17, 250, 33]], device="cuda")
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    return transformers.__version__, lambda: model.generate(prompt, **given)[0].tolist()


def onnxruntime_():
    import numpy
    import onnxruntime

    from onnxruntime_ import model

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise Skip(f"onnxruntime {onnxruntime.__version__} was built without the CUDA provider")
    # CUDA's libraries of this Python's packages.
    onnxruntime.preload_dlls()
    session = onnxruntime.InferenceSession(model(None), providers=["CUDAExecutionProvider"])
    values = numpy.random.default_rng(0).standard_normal((512, 512)).astype(numpy.float32)
    return onnxruntime.__version__, lambda: session.run(None, {"a": values, "b": values})[0].tobytes()


def holds(values):
    """What another process does with a tensor of this one's."""
    while True:
        values.sum().item()
        time.sleep(0.1)


def processes():
    """A tensor that two processes have, by torch.multiprocessing, which shares it by CUDA IPC."""
    import torch
    import torch.multiprocessing

    torch.manual_seed(0)
    values = torch.randn(1024, 1024, device="cuda")
    torch.multiprocessing.get_context("spawn").Process(target=holds, args=(values,), daemon=True).start()
    return torch.__version__, lambda: (values @ values).cpu().numpy().tobytes()


WIDTH, HEIGHT, PICTURES = 1280, 720, 30


def picture(av, number):
    made = av.VideoFrame(WIDTH, HEIGHT, "yuv420p")
    made.pts = number
    for plane in made.planes:
        line = bytes((column * 3 + number * 5) & 255 for column in range(plane.line_size))
        plane.update(b"".join(line[row % 64 :] + line[: row % 64] for row in range(plane.height)))
    return made


def ffmpeg(decoder="h264_cuvid"):
    """Decodes H.264 on the GPU without end, by one decoder; libx264 makes it here, PICTURES from an IDR on, again and again. The result
    is each picture's MD5, by its number from the IDR: a timestamp says which it is, also where the decoder holds some back."""
    import av

    encoder = av.CodecContext.create("libx264", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = WIDTH, HEIGHT, "yuv420p", fractions.Fraction(1, 30)
    encoder.options = {"bf": "0", "threads": "1", "preset": "ultrafast"}
    packets = [packet for number in range(PICTURES) for packet in encoder.encode(picture(av, number))] + encoder.encode(None)
    decoder = av.CodecContext.create(decoder, "r")
    frames, rounds = decoded(decoder, packets), itertools.count()
    held = []

    def step():
        wanted, found = next(rounds), [None] * PICTURES
        while True:
            at, digest = held.pop() if held else next(frames)
            if at // PICTURES > wanted:
                held.append((at, digest))
                return found
            if at // PICTURES == wanted:
                found[at % PICTURES] = digest

    return av.__version__, step


def decoded(decoder, packets):
    """The number and the MD5 of each picture, of the packets again and again."""
    for number, packet in enumerate(itertools.cycle(packets)):
        packet.pts = packet.dts = number
        for frame in decoder.decode(packet):
            digest = hashlib.md5()
            for plane in frame.planes:
                digest.update(plane)
            yield frame.pts, digest.hexdigest()


STEPS = {
    "torch": torch_, "graph": graph, "compile": compile_, "jax": jax_, "cupy": cupy_, "transformers": tokens, "onnxruntime": onnxruntime_,
    "processes": processes, "ffmpeg": ffmpeg,
}


def say(**line):
    print(json.dumps(line), flush=True)


# Rounds before the first that counts, and rounds that have to be as that one before the process is ready.
WARM, ALIKE = 2, 5


def differing(now, first):
    """How many of its results are not as at first, and of how many."""
    if isinstance(first, list):
        return sum(one != other for one, other in itertools.zip_longest(now, first)), len(first)
    return int(now != first), 1


class Changes:
    """What is told of rounds that were not as the first."""

    def __init__(self, first):
        self.first, self.longest, self.told = first, 0.0, {}

    def look(self, count, now, seconds):
        self.longest = max(self.longest, seconds) if not self.told else self.longest
        wrong, of = differing(now, self.first)
        if wrong and not self.told:
            self.told = {"round": count, "differ": wrong, "of": of, "rounds": 0, "longest_s": round(self.longest, 2)}
        if wrong:
            self.told["rounds"] += 1


def main(name, seconds):
    try:
        version, step = STEPS[name]()
    except Skip as why:
        return say(event="skipped", skipped=str(why))
    for _ in range(WARM):
        step()
    changes = Changes(step())
    for number in range(1, ALIKE + 1):
        wrong, of = differing(step(), changes.first)
        if wrong:
            return say(event="skipped", skipped=f"by itself, {wrong} of {of} results differ in round {number}, before any suspension")
    say(event="info", error=None, version=version)
    until, told, began = time.monotonic() + seconds, 0.0, time.monotonic()
    for count in itertools.count(1):
        result, before, began = step(), began, time.monotonic()
        changes.look(count, result, began - before)
        if began - told > 0.1:
            told = began
            say(event="round", n=count, equal=not changes.told, **({"changed": changes.told} if changes.told else {}))
        if began > until:
            return say(event="end", result="CUDA_SUCCESS")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

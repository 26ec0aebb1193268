"""Continue a batch of prompts of different lengths, then stream one: to the terminal, and to a loop of one's own.

    python examples/batch_and_streaming.py

Runs offline on the bundled pair of models; `--num-parameters 0` is quicker (see `quickstart.py`).
"""

import argparse
from threading import Thread

from transformers import TextIteratorStreamer, TextStreamer

import hf_specdec
from hf_specdec.demo import DEMO_PROMPTS, load_demo_pair


def main() -> None:
    """Print the rows of a batch, and one text as it is written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-parameters", type=int, default=300_000_000, help="added to the target (0: none)")
    arguments = parser.parse_args()

    pair = load_demo_pair(num_parameters=arguments.num_parameters)
    model, tokenizer = pair.target, pair.tokenizer
    hf_specdec.enable(model)
    options = {"max_new_tokens": 48, "do_sample": False, "draft_model": pair.draft}

    # New tokens are added on the right, so the padding of shorter prompts belongs on the left.
    tokenizer.padding_side = "left"
    prompts = [DEMO_PROMPTS["docs"][1], DEMO_PROMPTS["json"][1], DEMO_PROMPTS["prose"][3]]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    new_tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
    for row, text in enumerate(tokenizer.batch_decode(new_tokens, skip_special_tokens=True)):
        print(f"---- row {row}\n{text}\n")
    print(f"{output.speculation}\n")

    inputs = tokenizer(prompts[0], return_tensors="pt").to(model.device)

    print("---- TextStreamer")
    model.generate(**inputs, **options, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))

    print("\n---- TextIteratorStreamer")
    # Without a timeout the loop would wait for ever if `generate` failed in its thread.
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=120, skip_special_tokens=True)
    thread = Thread(target=model.generate, kwargs={**inputs, **options, "streamer": streamer})
    thread.start()
    for piece in streamer:
        print(piece, end="", flush=True)
    thread.join()
    print()


if __name__ == "__main__":
    main()

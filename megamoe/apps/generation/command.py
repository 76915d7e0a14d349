"""Generate text from a checkpoint.

python tools/generate.py runs/demo --prompt "The king"
python tools/generate.py runs/demo --file prompts.txt --temperature 0.8 --top-p 0.95 --seed 7 --json out.json
python tools/generate.py runs/demo --prompt "The king" --max-tokens 20 --show-experts
python tools/generate.py runs/chat --chat                           # asks for lines, and answers each
python tools/generate.py runs/chat --chat --prompt "What is a deque?" --temperature 0
torchrun --nproc-per-node 2 tools/generate.py runs/demo --prompt "The king" parallel.expert=2

A file has one prompt on each line; empty lines are skipped. The draws of a prompt depend on --seed and on the
prompt, not on the other prompts of a batch. With --chat a prompt is what a user says; the chat template of
the model's conversations is put around it, and an answer ends with its turn. Arguments `section.key=value`
override the saved configuration.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from megamoe.apps.command import CONTROLS, check_options, lines_of, model_parser, run_tool, write_text
from megamoe.errors import UserError

MOST_BYTES, LONGEST = 1 << 28, 1 << 23  # of a file; characters of a prompt


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = model_parser(__doc__)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add("--file", type=Path, metavar="FILE", help="one prompt on each line")
    add("--max-tokens", type=int, default=128, help="for each prompt; default: 128")
    add("--temperature", type=float, default=1.0, help="0: the likeliest token; default: 1")
    add("--top-k", type=int, help="draw from the k likeliest tokens only")
    add("--top-p", type=float, help="draw from the fewest tokens of this probability only")
    add("--seed", type=int, default=1234, help="of the draws; default: 1234")
    add("--stop", action="append", default=[], metavar="TEXT", help="end there; repeatable")
    add("--chat", action="store_true", help="prompts are a user's; without any, ask for lines")
    add("--system", metavar="TEXT", help="of --chat: the system's message")
    add("--template", metavar="NAME", help="of --chat: a name, or a file of Jinja")
    add("--batch-size", type=int, default=8, help="prompts computed together; default: 8")
    add("--show-experts", action="store_true", help="print each token's experts and weights")
    add("--json", type=Path, metavar="FILE", help="the results as JSON")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _prompts(options: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(options.prompt)
    if options.file is not None:
        found = [line for line in lines_of("--file", options.file, MOST_BYTES) if line.strip()]
        if not found:
            raise UserError(f"--file: {options.file} has no prompt; expected one on each line")
        prompts += found
    if any(len(prompt) > LONGEST for prompt in prompts):
        raise UserError(f"a prompt has more than {LONGEST:,} characters; shorten it")
    if not prompts and not options.chat:
        raise UserError("there is no prompt; give --prompt TEXT or --file FILE")
    return prompts


def _check_chat(options: argparse.Namespace) -> None:
    for name in ("system", "template"):
        if getattr(options, name) is not None and not options.chat:
            raise UserError(f"--{name}: is for conversations; add --chat, or leave it out")
    if options.chat and (options.json or options.show_experts) and not (options.prompt or options.file):
        raise UserError("--chat: --json and --show-experts need --prompt TEXT or --file FILE")


def _run(options: argparse.Namespace) -> None:
    _check_chat(options)
    prompts = _prompts(options)
    check_options(options, "batch_size", "json")
    from megamoe.apps.generation.sampling import Sampling

    numbers = {
        name: getattr(options, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")
    }
    sampling = Sampling(**numbers, stop=tuple(options.stop))
    from megamoe.apps.evaluation.trained_model import session
    from megamoe.apps.generation.chat import chat_of, converse
    from megamoe.apps.generation.experts import lines_of_experts
    from megamoe.apps.generation.generate import encoded, generate, token_texts
    from megamoe.apps.generation.runner import leave_capacity_out

    with session(options.overrides, options.precision) as ranks:
        trained = ranks.open(options.path)
        if options.chat:
            chat = chat_of(trained, options.template, options.system)
            sampling = chat.ending(sampling)
            tokens = [chat.prompt(chat.ask(prompt), sampling.max_tokens) for prompt in prompts]
        else:
            tokens = encoded(trained, prompts, sampling.max_tokens)
        say = ranks.world.say
        for line in leave_capacity_out(trained):
            say(line)
        rows = []
        if not prompts:
            converse(chat, sampling)
            return
        how = {"show_experts": options.show_experts, "joined": not options.chat}
        generated = generate(trained, tokens, sampling, batch_size=options.batch_size, **how)
        for prompt, result in zip(prompts, generated, strict=True):
            row = dataclasses.asdict(result)
            rows.append({**row, "prompt": prompt, "prompt_tokens": result.prompt})
            say(f"--- prompt {len(rows)} ({len(result.tokens)} tokens, {result.reason})")
            say(((f"{prompt}\n> " if options.chat else prompt) + result.text).translate(CONTROLS))
            if options.show_experts:
                texts = token_texts(trained, result.prompt + result.tokens)
                for line in lines_of_experts(texts, result.experts):
                    say(line)
        if options.json is not None and ranks.world.is_first:
            write_text("--json", options.json, json.dumps(rows, indent=1) + "\n")

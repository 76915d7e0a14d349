"""Plants a fault for each promise of docs/ in a copy of the code, and checks that `make test` notices it.

    python tests/planted_faults.py              # all faults, each against the tests that should notice it
    python tests/planted_faults.py lock nul     # the faults of these names
    python tests/planted_faults.py --list       # name, promise and tests of each fault

A fault is a small edit of one file. It is noticed if one of its tests fails; only tests that `make test` runs
count. Before the faults, the same tests must pass on the copy as it is. Exit code 1: a fault was not noticed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("megamoe", "tests", "tools", "examples", "ds_configs", "benchmarks", "docs", "constraints")
COPIED_FILES = ("pyproject.toml", "pretrain_gpt_moe.py", "README.md", "Makefile")
PASSED, FAILED = 0, 1  # pytest's exit codes


@dataclass(frozen=True)
class Fault:
    """An edit that breaks a promise.

    name: for the command line. promise: what the page says. page: relative to docs/. file: the one that is
    edited. before, after: the text, which must occur in it once, and what takes its place. tests: pytest's
    arguments that select the tests which should notice it.
    """

    name: str
    promise: str
    page: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "tensor-sync",
        "gradients of norms, routers and shared experts are summed over tensor-parallel ranks",
        "parallelism.md",
        "megamoe/parallel/gradient_sync.py",
        "            dist.all_reduce(total, group=self.group)\n",
        "",
        ("tests/distributed/parity/test_tensor_parts.py",),
    ),
    Fault(
        "draws",
        "random draws are hashes of seed, step, layer and token, never of the rank",
        "parallelism.md",
        "megamoe/moe/rng.py",
        'text = f"{seed}/{step}/{layer}/{purpose}".encode()',
        "text = f\"{seed}/{step}/{layer}/{purpose}/{__import__('os').environ.get('RANK')}\".encode()",
        ("tests/distributed/parity/test_parity.py",),
    ),
    Fault(
        "aux-scale",
        "the gradient of an auxiliary loss is that of one rank under every layout",
        "parallelism.md",
        "megamoe/train/step.py",
        "share = 1.0 / (len(batches) * engine.layout.tensor)",
        "share = 1.0 / len(batches)",
        ("tests/distributed/parity/test_auxiliary_losses.py",),
    ),
    Fault(
        "token-count",
        "the lm loss is the mean over the unmasked tokens of the global batch",
        "parallelism.md",
        "megamoe/train/step_record.py",
        "        dist.all_reduce(tokens_K, group=engine.data_group)\n",
        "        tokens_K *= engine.layout.data\n",
        ("tests/distributed/parity/test_parity.py",),
    ),
    Fault(
        "expert-slices",
        "the outputs of an expert's slices are summed",
        "parallelism.md",
        "megamoe/moe/dispatch/all_to_all.py",
        "rows_MH.shape[1]).sum(0)",
        "rows_MH.shape[1]).mean(0)",
        ("tests/distributed/parity/test_dispatch.py",),
    ),
    Fault(
        "by-node-forward",
        "by node, what returns is the sum over a token's nodes",
        "layouts.md",
        "megamoe/moe/dispatch/between_nodes.py",
        "return sum_rows(back.run(rows_UH), state.sent, self.kernels)",
        "return sum_rows(back.run(rows_UH) / 2, state.sent, self.kernels)",
        ("tests/distributed/parity/test_by_node.py",),
    ),
    Fault(
        "by-node-backward",
        "by node, the gradient of the weights of pairs returns with the rows",
        "layouts.md",
        "megamoe/moe/dispatch/between_nodes.py",
        "weight_M = state.pairs.run(permute(pairs.weight_N, order_N))",
        "weight_M = state.pairs.run(permute(pairs.weight_N.detach(), order_N))",
        ("tests/distributed/parity/test_by_node.py",),
    ),
    Fault(
        "exchange-fp8",
        "in 8 bits a value's error is at most 1/16 of it",
        "layouts.md",
        "megamoe/moe/dispatch/fp8.py",
        "LARGEST = 448.0  # of e4m3",
        "LARGEST = 1792.0  # of e4m3",
        ("tests/moe/dispatch/test_fp8.py",),
    ),
    Fault(
        "padded-shares",
        "rows without a pair have the weight 0",
        "layouts.md",
        "megamoe/moe/routing.py",
        "return Pairs(token_R, expert_R, of_rows(pairs.weight_N, 0), choice_R)",
        "return Pairs(token_R.clamp(max=num_tokens - 1), expert_R, of_rows(pairs.weight_N, 1), choice_R)",
        ("tests/moe/capacity/test_padded.py",),
    ),
    Fault(
        "later-gradients",
        "the experts' weight gradients are computed beside the exchange",
        "layouts.md",
        "megamoe/kernels/experts/grouped_gemm.py",
        "places = range(len(later.weights))",
        "places = range(1, len(later.weights) + 1)",
        ("tests/moe/experts/test_later_gradients.py",),
    ),
    Fault(
        "gated-weights",
        "gate and value of a gated FFN are split separately, and a checkpoint loads at another layout",
        "checkpoints.md",
        "megamoe/parallel/chunks.py",
        "(number * shard.count + shard.index) * block + inside",
        "(shard.index * shard.stride + number) * block + inside",
        ("tests/parallel/test_chunks.py",),
    ),
    Fault(
        "muon-halves",
        "gate and value of a gated FFN are orthogonalised separately",
        "optimizers.md",
        "megamoe/optim/matrices.py",
        '            found[f"{name}.linear_fc1.weight"] = 1, (1, 1)',
        '            found[f"{name}.linear_fc1.weight"] = 1, (1,)',
        ("tests/optim/test_muon.py",),
    ),
    Fault(
        "muon-slices",
        "a rank sends the owner all that it holds of a matrix under ZeRO",
        "optimizers.md",
        "megamoe/parallel/zero/matrix_exchange.py",
        "return weight.starts is not None or",
        "return",
        ("tests/distributed/parity/test_muon.py",),
    ),
    Fault(
        "muon-owners",
        "the matrices' owners share the work by FLOPs",
        "optimizers.md",
        "megamoe/parallel/zero/matrix_exchange.py",
        "                load[rank] += cost\n",
        "                load[rank] += 0\n",
        ("tests/optim/test_muon.py",),
    ),
    Fault(
        "muon-momentum",
        "Muon's momentum is restored",
        "optimizers.md",
        "megamoe/checkpoint/state.py",
        "            state[tensor] = dict(moments)\n            if names",
        "            state[tensor] = dict(moments) if names == MOMENTS else {}\n            if names",
        ("tests/distributed/checkpoints/test_muon_states.py",),
    ),
    Fault(
        "qk-clip-shared",
        "the shared keys of grouped queries stay as they are",
        "optimizers.md",
        "megamoe/model/attention/qk_clip.py",
        "if own else torch.ones_like(query_GP[:, :1])",
        "if own else query_GP[:, :1]",
        ("tests/train/test_attention_logits.py",),
    ),
    Fault(
        "ema-restored",
        "the mean of the weights goes on after a resume",
        "optimizers.md",
        "megamoe/checkpoint/state.py",
        "                mean.of[tensor] = values\n",
        "                del values\n",
        ("tests/train/test_weight_mean.py",),
    ),
    Fault(
        "noise-scale-shares",
        "a micro batch's own gradient is its share of the step's times their number",
        "optimizers.md",
        "megamoe/optim/noise_scale.py",
        "self._squares[part] * micro_batches, whole",
        "self._squares[part], whole",
        ("tests/optim/test_noise_scale.py",),
    ),
    Fault(
        "checksums",
        "no flipped byte of a checkpoint goes unnoticed",
        "checkpoints.md",
        "megamoe/checkpoint/format/files.py",
        "is_plain(path) and sha256(path) != expected",
        "is_plain(path) and len(sha256(path)) != len(expected)",
        (
            "tests/checkpoint/format/test_integrity.py",
            "tests/distributed/checkpoints/test_checkpoint_tool.py",
        ),
    ),
    Fault(
        "lock",
        "a second launch in a run's folder is refused",
        "faults.md",
        "megamoe/resilience/processes.py",
        "        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        pass\n",
        ("tests/resilience/test_run_lock.py",),
    ),
    Fault(
        "skipped-step",
        "a skipped step leaves weights and moments, bit for bit",
        "runs.md",
        "megamoe/parallel/zero/engine.py",
        "with nullcontext() if apply_update else skip_update(self._engine.optimizer), self._watching():",
        "with nullcontext(), self._watching():",
        ("tests/distributed/faults/test_skipped_steps.py",),
    ),
    Fault(
        "resume-position",
        "a run resumes at exactly the sample at which it stopped",
        "data.md",
        "megamoe/data/batches.py",
        "            start = start_sample + number * stride\n",
        "            start = number * stride\n",
        ("tests/data/test_batches.py", "tests/distributed/checkpoints/test_resume.py"),
    ),
    Fault(
        "capacity",
        "an expert computes at most its capacity of pairs",
        "all_parts.md",
        "megamoe/moe/capacity/per_expert.py",
        "return place_N < size",
        "return place_N <= size",
        ("tests/moe/capacity/test_per_expert.py",),
    ),
    Fault(
        "temperature",
        "the cosine scorer divides by its temperature",
        "all_parts.md",
        "megamoe/moe/scorers/cosine.py",
        "scores_TE = scores_TE / self.log_temperature",
        "scores_TE = scores_TE * self.log_temperature",
        ("tests/moe/scorers/test_cosine.py",),
    ),
    Fault(
        "threshold",
        "the threshold selector takes the fewest experts whose probabilities reach it",
        "all_parts.md",
        "megamoe/moe/selectors/threshold.py",
        "return most_S.minimum(too_few_S + 1)",
        "return most_S.minimum(too_few_S + 2)",
        ("tests/moe/selectors/test_threshold.py",),
    ),
    Fault(
        "balance",
        "the Switch loss is 1 at perfect balance",
        "all_parts.md",
        "megamoe/moe/losses/switch_balance.py",
        "return routing.num_experts * (fractions(counts_E)",
        "return (routing.num_experts - 1) * (fractions(counts_E)",
        ("tests/moe/losses/test_switch_balance.py",),
    ),
    Fault(
        "compiled-experts",
        "the compiled experts equal their plain form, gradients included",
        "speed.md",
        "megamoe/kernels/cpu/swiglu.h",
        "    out[1] = sent * open;\n",
        "    out[1] = sent * share;\n",
        ("tests/kernels/test_experts.py",),
    ),
    Fault(
        "signal",
        "at SIGTERM all ranks save and end",
        "faults.md",
        "megamoe/resilience/stopping.py",
        "self._signal = self._signal or number",
        "self._signal = self._signal",
        ("tests/distributed/faults/test_signals.py", "tests/resilience/test_stopping.py"),
    ),
    Fault(
        "watchdog",
        "a run that hangs is ended, and its stacks are printed",
        "faults.md",
        "megamoe/resilience/watchdog.py",
        "if silent_s > self.limit_s or (",
        "if silent_s > 1000 * self.limit_s or (",
        ("tests/distributed/faults/test_watchdog.py",),
    ),
    Fault(
        "rank-consistency",
        "ranks that are started with different settings are refused",
        "faults.md",
        "megamoe/parallel/rank_consistency.py",
        "            if found is not None:\n                return (section, *found)\n",
        "            pass\n",
        ("tests/distributed/launch/test_rank_consistency.py",),
    ),
    Fault(
        "nul",
        "NUL bytes of a power failure in metrics.jsonl are left out",
        "faults.md",
        "megamoe/metrics/reader.py",
        'if broken is None and text and b"\\0" not in raw:',
        "if broken is None and text:",
        ("tests/metrics/test_record.py",),
    ),
    Fault(
        "vocabulary",
        "a token id outside of the vocabulary is refused before the first step",
        "data.md",
        "megamoe/data/verify.py",
        "    if smallest < 0 or largest >= vocab_size:\n",
        "    if smallest < 0:\n",
        ("tests/data/test_damages.py",),
    ),
    Fault(
        "exit-code",
        "a user's mistake ends with exit code 2",
        "runs.md",
        "megamoe/errors.py",
        "MISTAKE = 2",
        "MISTAKE = 3",
        ("tests/test_command_line.py",),
    ),
    Fault(
        "clipping",
        "clipping is by the norm of the whole model, the experts of other ranks included",
        "parallelism.md",
        "megamoe/optim/optimizers.py",
        "        dist.all_reduce(squares, group=group)\n",
        "",
        ("tests/distributed/parity/test_parity.py",),
    ),
    Fault(
        "evaluation",
        "the loss of an evaluation is the one that training reports",
        "evaluation.md",
        "megamoe/apps/evaluation/perplexity.py",
        "sums.loss += float((losses_BS * batch.loss_mask_BS).double().sum())",
        "sums.loss += float(losses_BS.double().sum())",
        ("tests/apps/evaluation/test_perplexity.py",),
    ),
    Fault(
        "generation-cache",
        "generation with the key/value cache gives the logits of a plain pass",
        "generation.md",
        "megamoe/apps/generation/runner.py",
        "        self.cache.advance(size)\n",
        "        self.cache.advance(size + 1)\n",
        ("tests/apps/generation/test_generate.py",),
    ),
    Fault(
        "routing-metrics",
        "the routing metrics are sums over all ranks",
        "metrics.md",
        "megamoe/train/step_record.py",
        "        dist.all_reduce(packed, group=stage)\n",
        "",
        ("tests/distributed/parity/test_routing_metrics.py",),
    ),
    Fault(
        "metric-names",
        "every key that a run logs is in the tables",
        "metrics.md",
        "megamoe/train/trainer.py",
        "            names.LR: lr,\n",
        '            names.LR: lr,\n            "train/planted": lr,\n',
        ("tests/test_metrics_page.py",),
    ),
    Fault(
        "replay",
        "a replay chooses what was recorded, bit for bit",
        "runs.md",
        "megamoe/apps/routing_record/replay.py",
        "pairs = selector.replayed(scored, expert_TK.to(device), count_T.to(device))",
        "pairs = selector(scored, context)",
        ("tests/distributed/parity/test_routing_replay.py",),
    ),
    Fault(
        "documents",
        "attention does not see another document of the sequence",
        "backends.md",
        "megamoe/kernels/attention/documents.py",
        "return ((place_L >= start_BL[..., None]) & (place_L <= place_L[:, None]))[:, None]",
        "return (place_L <= place_L[:, None]).expand(*start_BL.shape, -1)[:, None]",
        ("tests/kernels/test_documents.py",),
    ),
    Fault(
        "stage-context",
        "a pipeline stage recomputes a micro batch with that one's draws",
        "layouts.md",
        "megamoe/train/step.py",
        "            set_micro_batch(self.context, kept.of_micro_batch)\n",
        "",
        ("tests/distributed/parity/test_stages.py",),
    ),
    Fault(
        "remote-damage",
        "a damaged checkpoint of the object storage is told, and the next is taken",
        "checkpoints.md",
        "megamoe/checkpoint/remote.py",
        "return missing or next(files.problems(folder), None)",
        "return missing",
        ("tests/checkpoint/test_remote.py",),
    ),
    Fault(
        "remote-writer",
        "of two launches that write to one place, the one that started last may",
        "checkpoints.md",
        "megamoe/checkpoint/uploads.py",
        "if writer != self.launch:",
        "if not writer:",
        ("tests/checkpoint/test_remote.py",),
    ),
    Fault(
        "chat-mask",
        "the loss is on the assistant's words alone",
        "chat.md",
        "megamoe/apps/chat/dataset.py",
        "mask_S[first : last - 1] = learned_S[1:] / (",
        "mask_S[first : last - 1] = 1 / (",
        ("tests/apps/chat/test_chat.py",),
    ),
    Fault(
        "tied-stages",
        "both copies of a tied embedding get the sum of both gradients",
        "layouts.md",
        "megamoe/parallel/zero/engine.py",
        "        self._replicas.sum_gradients(self._engine.optimizer)\n",
        "",
        ("tests/distributed/parity/test_stages.py",),
    ),
    Fault(
        "stages-norm",
        "the gradient norm is one of all pipeline stages",
        "layouts.md",
        "megamoe/optim/optimizers.py",
        "    if ModelParallelUnit.get_pipeline_model_parallel_world_size() > 1:\n",
        "    if False:\n",
        ("tests/distributed/parity/test_stages.py",),
    ),
    Fault(
        "host-waits",
        "the host waits for the device no more often than the stored budget says",
        "gpu.md",
        "megamoe/train/step.py",
        "        self.engine.backward(loss, last, completes",
        "        loss.item()\n        self.engine.backward(loss, last, completes",
        ("tests/cuda/test_training.py",),
    ),
    Fault(
        "hostfile",
        "a hostfile that is missing or wrong is one line before anything starts",
        "faults.md",
        "megamoe/apps/cluster/hostfile.py",
        "        if match is None or int(match[2]) == 0:\n",
        "        if match is None:\n",
        ("tests/distributed/launch/test_deepspeed_launch.py",),
    ),
    Fault(
        "array-job",
        "a task of an array has Slurm's name <array>_<line>",
        "slurm.md",
        "megamoe/resilience/run_status.py",
        """    if "SLURM_ARRAY_JOB_ID" in os.environ:\n""",
        "    if False:\n",
        ("tests/apps/cluster/test_run_status.py",),
    ),
    Fault(
        "turn-hand-over",
        "each exchange runs beside the attention, the router or the experts of the other micro batch",
        "layouts.md",
        "megamoe/moe/dispatch/transfer.py",
        "values = end_turn(rows.values) if self.takes_turns else rows.values",
        "values = rows.values",
        ("tests/distributed/costs/test_hidden_exchange.py",),
    ),
    Fault(
        "turn-numbers",
        "the turns of the backward pass are those of the forward passes in reverse",
        "layouts.md",
        "megamoe/moe/turns.py",
        "        raise_node_numbers(self._number)\n        self._enter(state)\n",
        "        self._enter(state)\n",
        ("tests/distributed/costs/test_hidden_exchange.py",),
    ),
    Fault(
        "turn-micro-batch",
        "losses, weights and metrics are those of one micro batch after the other",
        "layouts.md",
        "megamoe/train/in_flight.py",
        "        set_micro_batch(context, self.of_micro_batch)\n",
        "",
        ("tests/distributed/parity/test_in_flight.py",),
    ),
    Fault(
        "turn-recomputed",
        "a block of a micro batch in flight is computed again for that micro batch",
        "layouts.md",
        "megamoe/train/step.py",
        "lambda place: set_micro_batch(context, self._kept[first + place, 0].of_micro_batch)",
        "lambda place: None",
        ("tests/distributed/parity/test_in_flight.py",),
    ),
    Fault(
        "turn-gradients",
        "a parameter gets the gradients of two micro batches in flight one after the other",
        "layouts.md",
        "megamoe/parallel/zero/engine.py",
        "        if self.stage == 2:\n            gradients = ",
        "        if True:\n            gradients = ",
        ("tests/distributed/parity/test_in_flight.py",),
    ),
)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="faults to plant; default: all")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    options = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no fault {unknown[0]!r}; choose from {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(FAULTS)
    if options.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.promise} (docs/{fault.page}); {', '.join(fault.tests)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        return _plant_all(chosen, copy_of_code(Path(folder) / "code"))


def copy_of_code(target: Path) -> Path:
    """Copy what the tests need to `target`, and return it."""
    target.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in COPIED_FILES:
        shutil.copy2(ROOT / name, target / name)
    return target


def _plant_all(faults: Sequence[Fault], copy: Path) -> int:
    if _run(copy, sorted({test for fault in faults for test in fault.tests})) != PASSED:
        print("error: the tests do not pass on the code as it is; mend that first", file=sys.stderr)
        return 1
    missed = [fault.name for fault in faults if not _is_noticed(fault, copy)]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults noticed")
    if missed:
        print(f"error: not noticed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _is_noticed(fault: Fault, copy: Path) -> bool:
    started = time.monotonic()
    path = copy / fault.file
    original = path.read_text(encoding="utf-8")
    path.write_text(planted(fault, original), encoding="utf-8")
    try:
        code = _run(copy, fault.tests)
    finally:
        path.write_text(original, encoding="utf-8")
    # Another exit code than FAILED is no notice: no tests, an error of usage or an interrupt.
    verdict = {FAILED: "noticed", PASSED: "NOT NOTICED"}.get(code, f"pytest ended with {code}")
    print(f"{fault.name}: {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    return code == FAILED


def planted(fault: Fault, original: str) -> str:
    """Return the file's text with the fault.

    Raises:
        ValueError: if the text to replace does not occur exactly once.
    """
    count = original.count(fault.before)
    if count != 1:
        raise ValueError(
            f"{fault.name}: expected {fault.before!r} once in {fault.file}, found it {count} times"
        )
    return original.replace(fault.before, fault.after)


def _run(copy: Path, tests: Iterable[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not full", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())

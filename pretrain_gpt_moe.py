"""Pretrain a Mixture-of-Experts language model.

python pretrain_gpt_moe.py --config examples/demo.yaml [section.key=value ...]
torchrun --nproc-per-node 2 pretrain_gpt_moe.py --config examples/demo.yaml train.micro_batch_size=4
"""

from megamoe.train.command import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    run()

"""`python -m megamoe` and `torchrun -m megamoe`: pretrain_gpt_moe.py for an installed package."""

from megamoe.train.command import run

if __name__ == "__main__":
    run()

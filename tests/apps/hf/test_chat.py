"""The folder of a run that was tuned on conversations: its chat template, and generation that ends."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.chat.conversation import conversation_of
from megamoe.apps.chat.prepare import load_chat_card
from megamoe.apps.hf.chat_files import chat_of
from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.folder import tokenizer_files
from megamoe.config import parse_config
from megamoe.data.tokenizers import load_tokenizer
from megamoe.train.trainer import Trainer
from tests.support.data import conversations as talks
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run

transformers = pytest.importorskip("transformers")
SAVED = {"train": {"objective": {"name": "chat"}}}
ENDS = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>"}


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with each kind of tokenizer, by the name of the template, and `bytes` in ChatML."""
    folder = tmp_path_factory.mktemp("chat")
    file, hub = talks.make_tokenizer(folder), talks.make_folder(folder, "{{ 'another' }}")
    for name, template, tokenizer in (("llama3", "llama3", file), ("chatml", "chatml", hub)):
        talks.make_chat(folder, talks.conversations(), tokenizer, name, template=template)
    talks.make_chat(folder, talks.conversations(), Path("bytes"), "bytes", template="chatml")
    return folder


@pytest.mark.parametrize("name", ENDS)
def test_transformers_writes_the_text_that_was_trained_on(name: str, folder: Path, tmp_path: Path) -> None:
    config = parse_config({"data": {"sources": [str(folder / name)]}})
    chat = chat_of(SAVED, config)
    assert chat is not None and not chat.end_texts
    for file, content in chat.files(tokenizer_files(config)).items():
        (tmp_path / file).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = load_tokenizer(str(folder / "tokenizer.json"))
    template = load_chat_card(str(folder / name)).chat_template()
    talk = conversation_of(talks.conversation(2, 3, system=True, tool=True))
    text = template.render(talk).text
    assert theirs.apply_chat_template(talk.messages, talk.tools, tokenize=False) == text
    tokens = theirs.apply_chat_template(talk.messages, talk.tools)["input_ids"]
    assert tokens == ours.encode_marked(text)[0]
    stop = ours.marks[ENDS[name]]
    for known, expected in ((0, [0, stop]), (None, stop), ([99, 0], [99, 0, stop]), (stop, stop)):
        assert chat.ends({"eos_token_id": known}) == {"eos_token_id": expected}
    assert chat_of({"train": {"objective": {"name": "causal"}}}, config) is None


def tuned(folder: Path, output: Path, names: list[str]) -> None:
    """Job: a run of one step for each of the prepared conversations, in the folder of its name."""
    model = {"moe__layers": {"every": 1}, "moe__num_shared_experts": 0, "moe__losses": {}}
    model |= {"model__tie_embeddings": False, "model__vocab_size": None}
    for name in names:
        data = {"sources": [str(folder / name)], "sequence_length": 512, "document_aware": True}
        data |= {"split": [1, 0, 0]}
        config = small_run(output / name, **model, data=data)
        config.train.objective = parse_config({"train": {"objective": "chat"}}).train.objective
        trainer = Trainer(config)
        trainer.step()
        trainer.save()
        trainer.close()


def exported(folder: Path, name: str, **options: Any) -> list[str]:
    """Write `folder/hf_NAME`; return what is reported."""
    lines: list[str] = []
    export_run(folder / name / "small", folder / f"hf_{name}", report=lines.append, **options)
    return lines


@pytest.mark.full
def test_generation_ends_at_the_end_of_a_turn(pool: Pool, folder: Path, tmp_path: Path) -> None:
    pool.run(tuned, folder, tmp_path, ["llama3", "bytes"], ranks=1)
    assert len(exported(tmp_path, "llama3")) == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf_llama3", local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf_llama3")
    ends = [0, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    assert model.generation_config.eos_token_id == ends
    question = [{"role": "user", "content": "What is 1 and 2?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    likeliest = int(model(**prompt).logits[0, -1].argmax())
    weight = model.lm_head.weight
    for number in ends:
        with torch.no_grad():
            weight[number] = 2 * weight[likeliest]
        found = model.generate(**prompt, max_new_tokens=4, do_sample=False)
        assert found[0, prompt["input_ids"].shape[1] :].tolist() == [number]
        with torch.no_grad():
            weight[number] = 0
    lines = exported(tmp_path, "bytes")
    assert not list((tmp_path / "hf_bytes").glob("chat_template*"))
    assert any("an answer ends with the text '<|im_end|>', which is no token" in line for line in lines)


@pytest.mark.full
def test_a_template_that_is_gone_is_told(pool: Pool, folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("bytes*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    pool.run(tuned, tmp_path, tmp_path / "runs", ["bytes"], ranks=1)
    (tmp_path / "bytes.chat.json").unlink()
    lines = exported(tmp_path / "runs", "bytes")
    assert any("without its chat template and the end of a turn: data '" in line for line in lines)

"""Train a tiny GPT-2 from scratch with transformers' Trainer."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(Dataset):
    def __init__(self, texts, seed):
        self.tokens = torch.randint(64, (texts, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        seed=0,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        learning_rate=1e-3,
        warmup_steps=4,
        report_to=[],
        disable_tqdm=True,
        logging_steps=4,
    )
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    Trainer(model, arguments, train_dataset=Texts(180, seed=0), eval_dataset=Texts(30, seed=1)).train()


if __name__ == "__main__":
    main()

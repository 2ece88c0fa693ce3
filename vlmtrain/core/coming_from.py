"""Options of other trainers and what answers to them here. The tables of docs/coming-from.md are
made from this: python -m vlmtrain.core.coming_from docs/coming-from.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRAINERS = {
    "T": "Trainer",  # transformers.TrainingArguments, which ms-swift and LLaMA-Factory take too
    "S": "ms-swift",
    "L": "LLaMA-Factory",
    "M": "Megatron",  # Megatron-LM and Megatron-SWIFT
    "E": "ms-swift's environment",
}

# Names, each with the letters of its TRAINERS | options of `vlmtrain train` | what else to say
_TABLE = """
# Model, data, output
model_name_or_path:L | model
load:M | model | to go on with a run: --checkpoint.resume
output_dir:T save:M | output
overwrite_output_dir:TL add_version:S | | a folder with a run is never overwritten
dataset:SL data_path:M train_data_path:M | data | files, not names of a hub
dataset_dir:L | data | with the folder before the file's name
val_dataset:S eval_dataset:L valid_data_path:M | evaluate.data
split_dataset_ratio:S val_size:L split:M | evaluate.split_ratio
system:S default_system:L | loader.system
media_dir:L | loader.media_root
max_samples:L | loader.max_samples
mix_strategy:L interleave_probs:L interleave_prob:S | data | with weights, as a.json,b.json:0.25
columns:S | | rename the keys in the file; docs/data.md lists those that are read
strict:S | loader.unreadable | raise is the default
remove_unused_columns:T | loader.ignore_keys | a key that is not read is an error
streaming:SLM | | media are read when a step needs them, records are scanned once at the start
cached_dataset:S lazy_tokenize:SM tokenized_path:L | | vlmtrain data build --model FOLDER
load_from_cache_file:S overwrite_cache:L | | nothing is cached unless you run vlmtrain data build
dataset_num_proc:S preprocessing_num_workers:L | | vlmtrain data build --workers N
template:SL | loader.template | a Jinja file; without it the model folder's own
tokenizer_type:M tokenizer_model:M | | the model folder's tokenizer is used
use_hf:S model_revision:SL cache_dir:L | | --model and --data are on your disk: docs/2-train.md
push_to_hub:T hub_model_id:T hub_strategy:T | | OUTPUT/hf is what `hf upload` takes
trust_remote_code:L | | no code of a model folder is run
num_layers:M hidden_size:M num_attention_heads:M | | read from config.json
resume_only_model:S | model | the --output of the run before
agent_template:S tool_format:L | loader.template | the chat template writes tools
adapters:S adapter_name_or_path:L adapter_load:M | checkpoint.resume | an adapter goes on in its run
# Batches and packing
per_device_train_batch_size:T micro_batch_size:M | train.pack_length | a microbatch is one pack
per_device_eval_batch_size:T | train.pack_length | a microbatch is one pack
gradient_accumulation_steps:T | train.global_batch_packs | of all processes together
global_batch_size:M | train.global_batch_packs | packs, not samples
max_length:S cutoff_len:L | train.pack_length loader.too_long
seq_length:M packing_length:M | train.pack_length
truncation_strategy:S | loader.too_long
packing:SLM padding_free:SM | loader.packing | always on; samples never see each other
neat_packing:L | loader.packing | always on; samples never see each other
group_by_length:T train_sampling_strategy:T | loader.packing | packs cost the same anyway
auto_find_batch_size:T | train.fit | auto: recomputation and offload until it fits
dataloader_drop_last:T | | packs of all epochs are one stream, none is dropped
dataloader_num_workers:T num_workers:M | loader.workers
dataloader_pin_memory:T dataloader_prefetch_factor:T | | the next step is always read ahead
dataset_shuffle:S train_dataloader_shuffle:S disable_shuffling:L | | samples are always shuffled
# What is learned
loss_scale:S train_on_prompt:L mask_history:L | | the assistant's turns; `weight` in the data
average_tokens_across_devices:T calculate_per_token_loss:M | | always: a mean over a step's targets
norm_bbox:S | | boxes are written as the model was taught
label_smoothing_factor:T neftune_noise_alpha:T | | not offered
task_type:S rlhf_type:S stage:L | | supervised fine-tuning is what there is
do_train:T do_eval:T do_predict:T | | the command says it: train, evaluate, generate
# Steps and optimizer
num_train_epochs:T max_epochs:S train_samples:M | train.epochs
max_steps:T train_iters:M | train.steps
learning_rate:T lr:M | optimizer.lr
min_lr:M | optimizer.min_lr
warmup_steps:T lr_warmup_iters:M | optimizer.warmup_steps
warmup_ratio:T lr_warmup_fraction:M | optimizer.warmup_ratio
lr_scheduler_type:T lr_decay_style:M | optimizer.lr_scheduler_type
lr_scheduler_kwargs:T | optimizer.min_lr optimizer.decay_ratio optimizer.decay_type
lr_wsd_decay_style:M | optimizer.decay_type
lr_wsd_decay_iters:M | optimizer.decay_ratio | a share of all steps
lr_decay_iters:M | | the decay ends with the run
vit_lr:S | optimizer.vision_lr
aligner_lr:S | optimizer.merger_lr
weight_decay:TM | optimizer.weight_decay
adam_beta1:TM | optimizer.beta1
adam_beta2:TM | optimizer.beta2
adam_epsilon:T adam_eps:M | optimizer.eps
max_grad_norm:T clip_grad:M | optimizer.clip
no_check_for_nan_in_loss_and_grad:M | train.on_spike
optim:T optim_args:T optimizer:M | | AdamW is the only optimizer
seed:TM | train.seed
data_seed:T | train.seed | one seed for all
# Parts of the model
train_type:S tuner_type:S finetuning_type:L | lora.rank | all weights, unless it is above 0
lora_rank:SLM | lora.rank
lora_alpha:SLM | lora.alpha
lora_dropout:SLM | lora.dropout
target_modules:SM lora_target:L | lora.targets
freeze_parameters:S trainable_parameters:S | freeze.vision freeze.merger freeze.language
use_dora:SL use_rslora:SLM modules_to_save:SM additional_target:L | | not offered
quant_method:S quant_bits:S quantization_bit:L | | not offered; weights are not quantised
freeze_vit:SM freeze_vision_tower:L | freeze.vision | frozen there unless told otherwise, not here
freeze_aligner:SM freeze_multi_modal_projector:L | freeze.merger | as freeze_vit
freeze_llm:SM freeze_language_model:L freeze_LM:M | freeze.language
# Images and videos
max_pixels:S image_max_pixels:L MAX_PIXELS:E | media.max_pixels
image_min_pixels:L MIN_PIXELS:E | media.min_pixels
IMAGE_MAX_TOKEN_NUM:E | media.max_pixels | a token is 32 x 32 pixels, of Qwen2 and 2.5-VL 28 x 28
video_max_pixels:L VIDEO_MAX_PIXELS:E | media.video_max_pixels
video_min_pixels:L VIDEO_MIN_PIXELS:E | | set it in the model's video_preprocessor_config.json
VIDEO_TOTAL_PIXELS:E | media.video_max_pixels | of all frames; here of each, but for Qwen3-VL
VIDEO_MAX_TOKEN_NUM:E | media.video_max_pixels | tokens of a frame there
video_fps:L FPS:E | media.fps
video_maxlen:L FPS_MAX_FRAMES:E | media.max_frames
FPS_MIN_FRAMES:E | | not offered; at least 4 frames are taken
use_audio_in_video:L audio_sampling_rate:L image_do_pan_and_scan:L crop_to_patches:L | | not offered
model_kwargs:S | media.max_pixels media.fps media.max_frames
# Processes, memory, speed
NPROC_PER_NODE:E | nproc
tensor_model_parallel_size:M | parallel.tensor
pipeline_model_parallel_size:M | parallel.pipeline
virtual_pipeline_model_parallel_size:M | parallel.virtual_pipeline
num_virtual_stages_per_pipeline_rank:M | parallel.virtual_pipeline
num_layers_per_virtual_pipeline_stage:M | parallel.virtual_pipeline | chunks of a rank, not layers
pipeline_model_parallel_layout:M | parallel.text_layers parallel.vision_layers
decoder_first_pipeline_num_layers:M decoder_last_pipeline_num_layers:M | parallel.text_layers
account_for_embedding_in_pipeline_split:M | parallel.text_layers | it counts tower and head
sequence_parallel:M | parallel.sequence
expert_model_parallel_size:M | parallel.expert
num_experts:M | | read from config.json
router_aux_loss_coef:S moe_aux_loss_coef:L moe_aux_loss_coeff:M | | read from config.json
context_parallel_size:M sequence_parallel_size:S | | there is no context parallelism
overlap_grad_reduce:M | parallel.overlap_grad_reduce
overlap_param_gather:M | parallel.overlap_param_gather
tp_comm_overlap:M | parallel.tensor_overlap
use_distributed_optimizer:M | | always: replicas share the optimizer state
deepspeed:T fsdp:T | parallel.tensor parallel.pipeline | replicas share the optimizer state (ZeRO 1)
optimizer_cpu_offload:M optimizer_offload_fraction:M | optimizer.offload_fraction
gradient_checkpointing:T activation_checkpointing:T | recompute.language recompute.vision | or none
vit_gradient_checkpointing:SM | recompute.vision | full, or none
disable_gradient_checkpointing:L | recompute.language recompute.vision | none is the default
recompute_granularity:M recompute_modules:M | recompute.language recompute.vision
recompute_method:M recompute_num_layers:M | | full recomputes every layer by itself
ddp_find_unused_parameters:T | | parts that a step does not use need no setting
ddp_timeout:T distributed_timeout_minutes:M | train.timeout | in minutes
ddp_backend:T distributed_backend:M | | NCCL on GPUs, gloo on CPUs
use_cpu:T | | without a GPU the CPU is used
bf16:TM fp16:TM torch_dtype:S pure_bf16:L infer_dtype:L | train.precision | bf16 or fp32
tf32:T | | on with bf16, off with fp32
fp8:L fp8_format:M fp8_recipe:M | train.precision | bf16 or fp32
attn_impl:S flash_attn:L attention_backend:M | | chosen for you; python -m vlmkernels.info
use_liger_kernel:T enable_liger_kernel:L use_unsloth:L | | the package's own kernels are always on
torch_compile:T | | not offered
# Checkpoints and logs
save_steps:T save_interval:M | checkpoint.every
save_strategy:T | checkpoint.every | a number of steps, or epoch
save_total_limit:T | checkpoint.keep
load_best_model_at_end:T metric_for_best_model:T | checkpoint.keep_best | by held-out loss
greater_is_better:T | checkpoint.keep_best | by held-out loss
eval_steps:T eval_interval:M | evaluate.every
eval_strategy:T | evaluate.every | a number of steps, or epoch
eval_iters:M | evaluate.data | all of it, each time
report_to:T | train.tensorboard train.wandb
logging_dir:T tensorboard_dir:M | train.tensorboard | OUTPUT/tensorboard
disable_tqdm:T | | bars are shown on a terminal only
save_only_model:T no_save_optim:M | | checkpoints hold everything; OUTPUT/hf the model alone
ckpt_format:M async_save:M | | torch_dist, written while training goes on
exit_signal_handler:M | | SIGTERM saves and ends
resume_from_checkpoint:T | checkpoint.resume | latest or a step, of the same --output
ignore_data_skip:T | | a resumed run takes the next samples, on any layout
finetune:M no_load_optim:M no_load_rng:M | | so it is without --checkpoint.resume
logging_steps:T log_interval:M | train.log_every | metrics.jsonl has every step
wandb_project:M | train.wandb
plot_loss:L log_throughput:M | | every line of a step, and vlmtrain report OUTPUT
"""


@dataclass(frozen=True)
class Entry:
    """Options of other trainers that one sentence answers."""

    names: dict[str, str]  # with the letters of their trainers
    here: tuple[str, ...]  # options of `vlmtrain train`; where there are none, `says` tells why
    says: str

    def answer(self, here: Sequence[str]) -> str:
        """The sentence, with the options that it names as the command has them."""
        options = "here " + " ".join(f"--{option}" for option in here) if here else ""
        return "; ".join(filter(None, (options, self.says)))


def _read(text: str) -> dict[str, list[Entry]]:
    """The entries by the title of their section."""
    sections: dict[str, list[Entry]] = {}
    for line in text.strip().splitlines():
        if line.startswith("# "):
            section = sections.setdefault(line[2:], [])
        else:
            names, here, says = (line + " | ").split("|")[:3]
            pairs = dict(name.split(":") for name in names.split())
            section.append(Entry(pairs, tuple(here.split()), says.strip()))
    return sections


SECTIONS = _read(_TABLE)
BY_NAME = {name.lower(): e for entries in SECTIONS.values() for e in entries for name in e.names}
MARK = "<!-- from here on made by: python -m vlmtrain.core.coming_from docs/coming-from.md -->\n"


def tables() -> str:
    """What stands in docs/coming-from.md behind MARK."""
    lines = []
    for title, entries in SECTIONS.items():
        lines += ["", f"## {title}", "", "| there | here |", "|---|---|"]
        for entry in entries:
            names = (
                f"`{name}` ({', '.join(TRAINERS[letter] for letter in trainers)})"
                for name, trainers in entry.names.items()
            )
            options = " ".join(f"`--{option}`" for option in entry.here)
            says = "; ".join(filter(None, (options, entry.says)))
            lines.append(f"| {', '.join(names)} | {says} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    page.write_text(before + mark + tables(), encoding="utf-8")

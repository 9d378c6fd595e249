"""Options of vLLM's engine by access: every client, clients where an operator permits it, no client.

Each option of engine_options.json is in exactly one of the three tables: a test compares them, so that an
option of a new vLLM is refused until a maintainer has assigned it.
"""

from app.inference.model_repository import QUANTIZATIONS

# Every client may set these: they name no file, class, address or secret. Texts that are not one of the
# option's choices have the pattern of a plain name (engine_options). The value is the help; "": the name is enough.
FREE: dict[str, dict[str, str]] = {
    "Memory and cache": {
        "max_model_len": "Most tokens of a request, prompt and output together.",
        "gpu_memory_utilization": "Share of the GPU's memory for weights and cache, at most 1.",
        "kv_cache_memory_bytes": "Size of the key-value cache of a GPU; replaces the share of its memory.",
        "kv_cache_dtype": "Number type of the key-value cache; fp8 halves its size.",
        "kv_cache_dtype_skip_layers": "Layers whose cache keeps the model's own number type.",
        "enable_prefix_caching": "Keep the cache of prompts for later ones with the same beginning.",
        "prefix_caching_hash_algo": "Hash that finds equal beginnings.",
        "prefix_cache_retention_interval": "",
        "prefix_match_unit": "",
        "block_size": "Tokens of a block of the cache.",
        "num_gpu_blocks_override": "Blocks of the cache, instead of the measured number.",
        "cpu_offload_gb": "GB of weights for each GPU that stay in the host's memory.",
        "cpu_offload_params": "Names of parameters that are offloaded.",
        "offload_backend": "",
        "offload_group_size": "",
        "offload_num_in_group": "",
        "offload_params": "",
        "offload_prefetch_step": "",
        "kv_offloading_size": "GB of host memory for blocks that leave the GPU's cache.",
        "kv_sharing_fast_prefill": "",
        "swa_bounded_replay": "",
        "disable_hybrid_kv_cache_manager": "One size of cache for all layers.",
        "enable_cumem_allocator": "",
        "enable_shm_tensor_arena": "",
    },
    "Scheduling": {
        "max_num_seqs": "Most requests that generate at the same time.",
        "max_num_batched_tokens": "Most tokens of a step: more raise throughput and delay single tokens.",
        "max_num_scheduled_tokens": "",
        "max_num_active_seqs": "",
        "max_num_queued_reqs": "",
        "max_num_queued_tokens": "",
        "enable_chunked_prefill": "Read a long prompt in parts, beside requests that generate.",
        "long_prefill_token_threshold": "Tokens from which a prompt counts as long; 0: none does.",
        "long_prefill_token_threshold_adaptive": "",
        "scheduling_policy": "fcfs: by arrival; priority: by the request's priority.",
        "scheduler_reserve_full_isl": "",
        "async_scheduling": "Plan the next step while this one runs.",
        "stream_interval": "Tokens between two parts of a stream.",
        "prefill_schedule_interval": "",
        "watermark": "Share of the cache that stays free when a request is admitted.",
        "performance_mode": "Preference of the engine's defaults.",
    },
    "Number types and quantization": {
        "dtype": "Number type of weights and computation.",
        "quantization": "Method of quantization of the weights.",
        "allow_deprecated_quantization": "",
        "use_fp64_gumbel": "",
    },
    "Execution": {
        "enforce_eager": "No CUDA graphs: a quicker start, slower tokens.",
        "optimization_level": "0: the quickest start; 3: the fastest tokens.",
        "cudagraph_capture_sizes": "Batch sizes for which CUDA graphs are recorded.",
        "max_cudagraph_capture_size": "Largest batch with a CUDA graph.",
        "attention_backend": "Implementation of attention.",
        "disable_cascade_attn": "",
        "disable_sliding_window": "Limit the length to the window instead of using windows.",
        "moe_backend": "Implementation of mixtures of experts.",
        "linear_backend": "",
        "sparse_indexer_topk_backend": "",
        "gdn_prefill_backend": "",
        "kda_prefill_backend": "",
        "kda_decode_backend": "",
        "enable_flashinfer_autotune": "",
        "model_impl": "vllm: vLLM's own code of the model; transformers: that of Transformers.",
        "jit_monitor_mode": "",
        "jit_monitor_verbose": "",
        "seed": "Seed of the engine's random numbers.",
    },
    "Parallelism": {
        "pipeline_parallel_size": "Stages of layers on different GPUs, by default one a node; it must divide the launch's GPUs.",
        "decode_context_parallel_size": "GPUs that share the cache of a request.",
        "enable_expert_parallel": "Whole experts on each GPU, instead of a part of each.",
        "enable_eplb": "Move experts between GPUs by their load.",
        "enable_ep_weight_filter": "",
        "expert_placement_strategy": "",
        "all2all_backend": "",
        "distributed_executor_backend": "mp: a process for each GPU; uni: one process. Several nodes: ray.",
        "distributed_timeout_seconds": "",
        "cpu_distributed_timeout_seconds": "",
        "disable_custom_all_reduce": "Use NCCL for sums over GPUs.",
        "enable_dbo": "",
        "ubatch_size": "",
        "dbo_decode_token_threshold": "",
        "dbo_prefill_token_threshold": "",
        "dcp_comm_backend": "",
        "dcp_q_replicate": "",
        "dcp_kv_cache_interleave_size": "",
        "cp_kv_cache_interleave_size": "",
        "enable_hc_sp": "",
        "enable_batch_sharded_sampling": "",
        "enable_nccl_comm_suspend": "",
    },
    "Loading": {
        "load_format": "auto and safetensors read safetensors; dummy: random weights, for measurements.",
        "safetensors_load_strategy": "How files of weights are read; prefetch suits network file systems.",
        "safetensors_prefetch_num_threads": "",
        "safetensors_prefetch_block_size": "",
        "max_parallel_loading_workers": "Processes that load at the same time, to save host memory.",
        "use_tqdm_on_load": "",
        "config_format": "Format of the model's configuration.",
        "tokenizer_mode": "Implementation of the tokenizer.",
        "generation_config": "auto: defaults of the model's generation_config.json; vllm: none.",
        "override_generation_config": 'Defaults of sampling parameters, such as {"temperature": 0.2}.',
        "runner": "pooling: compute embeddings or scores.",
        "convert": "",
    },
    "Speculation": {
        "spec_method": "ngram: guess from the text so far, without another model.",
        "spec_tokens": "Tokens that are guessed for each step.",
    },
    "Adapters": {
        "max_loras": "Adapters that may share a step.",
        "max_lora_rank": "At least the largest rank of the adapters.",
        "max_cpu_loras": "Adapters that are kept in the host's memory.",
        "lora_dtype": "",
        "lora_target_modules": "Modules whose adapters are used; all without it.",
        "fully_sharded_loras": "",
        "specialize_active_lora": "",
        "enable_tower_connector_lora": "",
        "enable_mixed_moe_lora_format": "",
        "enable_moe_shared_loras": "",
        "max_lora_cls_labels": "",
    },
    "Images": {
        "limit_mm_per_prompt": 'Most inputs of each kind in a request, such as {"image": 2}.',
        "language_model_only": "Texts only, although the model takes images.",
        "skip_mm_profiling": "Start without a trial run with images.",
        "interleave_mm_strings": "",
        "mm_encoder_only": "",
        "mm_encoder_tp_mode": "",
        "mm_encoder_attn_backend": "",
        "mm_encoder_attn_dtype": "",
        "mm_encoder_fp8_scale_save_margin": "",
        "mm_processor_cache_gb": "GB of the cache of processed images.",
        "mm_processor_cache_type": "",
        "mm_shm_cache_max_object_size_mb": "",
        "mm_hasher_algorithm": "",
        "mm_processor_device": "",
        "mm_device_do_normalize": "",
        "mm_ipc_gpu_memory_gb": "",
        "mm_tensor_ipc": "",
        "renderer_num_workers": "",
        "video_pruning_rate": "",
        "video_pruning_method": "",
        "disable_chunked_mm_input": "",
        "enable_mm_processor_stats": "",
    },
    "State space models": {
        "mamba_backend": "",
        "mamba_block_size": "",
        "mamba_cache_dtype": "",
        "mamba_cache_mode": "",
        "mamba_cache_philox_rounds": "",
        "mamba_ssm_cache_dtype": "",
        "mamba_ssu_algorithm": "",
        "enable_mamba_cache_stochastic_rounding": "",
        "enable_mamba_shared_prefix_checkpoint": "",
        "use_replayssm": "",
        "replayssm_buffer_len": "",
    },
    "Log probabilities and observation": {
        "max_logprobs": "Most log probabilities of a token that a request may have.",
        "logprobs_mode": "Before or after temperature and the other sampling parameters.",
        "log_level": "Least severe lines in the job's output.",
        "enable_logging_iteration_details": "",
        "kv_cache_metrics": "",
        "kv_cache_metrics_sample": "",
        "cudagraph_metrics": "",
        "enable_mfu_metrics": "",
        "enable_layerwise_nvtx_tracing": "",
        "per_request_spec_decode_metrics": "",
        "show_hidden_metrics_for_version": "",
        "fail_on_environ_validation": "",
        "enable_trace_replay": "",
    },
}

_CODE = "it can load Python code"
_PICKLES = "other formats can run code while they are read, or read from elsewhere"
_FILES = "it names files or models that the engine reads or writes"
_NETWORK = "it opens connections or ports"
_OBJECT = "its members may name classes, files or addresses"
_INPUTS = "clients' requests could then have the engine read files, addresses or tensors"
_LOGS = "prompts of all teams would be in the job's output"
# A profile permits these by name (`engine_options`).
GUARDED: dict[str, tuple[str, ...]] = {
    _CODE: (
        "code_revision", "io_processor_plugin", "logits_processors", "model_class_overrides",
        "reasoning_parser_plugin", "scheduler_cls", "worker_cls", "worker_extension_cls",
    ),
    _FILES: (
        "default_mm_loras", "download_dir", "hf_config_path", "ignore_patterns", "log_config_file",
        "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path", "pt_load_map_location",
        "spec_model", "tokenizer",
    ),
    _NETWORK: (
        "collect_detailed_traces", "ec_transfer_config", "kv_events_config", "kv_offloading_backend",
        "kv_transfer_config", "otlp_traces_endpoint",
    ),
    _OBJECT: (
        "additional_config", "attention_config", "compilation_config", "custom_histogram_buckets",
        "diffusion_config", "ec_manager_config", "engram_config", "eplb_config", "hf_overrides",
        "ir_op_priority", "kernel_config", "logging_config", "mamba_config", "mm_processor_kwargs",
        "model_loader_extra_config", "pooler_config", "profiler_config", "quantization_config",
        "reasoning_config", "speculative_config", "structured_outputs_config", "watermark_config",
    ),
    _INPUTS: (
        "allowed_local_media_path", "allowed_media_domains", "enable_mm_embeds",
        "enable_prompt_embeds", "media_io_kwargs",
    ),
    _LOGS: ("enable_log_requests",),
}  # fmt: skip
# Values that need no permission, of options that have others as well; None: all that vLLM lists.
NARROWED: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "config_format": (("auto", "hf", "mistral"), _CODE),
    "distributed_executor_backend": (("mp", "uni"), _CODE),
    "generation_config": (("auto", "vllm"), _FILES),
    "load_format": (("auto", "safetensors", "dummy"), _PICKLES),
    "mm_encoder_attn_backend": (None, _CODE),
    "model_impl": (("auto", "vllm", "transformers"), _CODE),
    "quantization": (QUANTIZATIONS, _CODE),
    "spec_method": (("ngram", "ngram_gpu", "mtp"), _FILES),
    "tokenizer_mode": (None, _CODE),
}

_ONE_ENGINE = "a server is one engine"
_DEVICES = "the job's resources decide it"
_LIFE = "the service starts, watches and ends the engine"
_OUTPUT = "no result of the service has its output"
# No client may set these.
OWNED: dict[str, tuple[str, ...]] = {
    "the `model` decides it": ("model", "model_weights"),
    "the `served_name` decides it": ("served_model_name",),
    "the `revision` decides it": ("revision", "tokenizer_revision"),
    "a launch has `trust_remote_code` for it": ("trust_remote_code",),
    "the adapters of the launch, or of the entry, decide it": ("enable_lora",),
    "it follows from `resources.gpus` and `resources.nodes`": ("tensor_parallel_size",),
    "the specification of a launch can be read, and this is a secret: log in on the host": (
        "hf_token",
    ),
    "the service reads reasoning by itself": ("reasoning_parser",),
    "it follows from `resources.nodes`": ("master_addr", "master_port", "nnodes", "node_rank"),
    _ONE_ENGINE: (
        "_api_process_count", "_api_process_rank", "data_parallel_address", "data_parallel_backend",
        "data_parallel_external_lb", "data_parallel_hybrid_lb",
        "data_parallel_multi_port_external_lb", "data_parallel_rank", "data_parallel_rpc_port",
        "data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank",
        "disable_nccl_for_dp_synchronization", "dp_sync_interval", "elastic_ep_max_dp_size",
        "enable_elastic_ep", "prefill_context_parallel_size", "ray_workers_use_nsight",
    ),
    _DEVICES: ("device_ids", "numa_bind", "numa_bind_cpus", "numa_bind_nodes"),
    _LIFE: (
        "aggregate_engine_logging", "disable_log_stats", "enable_fault_tolerance",
        "enable_sleep_mode", "fault_tolerance_config", "shutdown_timeout",
        "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "weight_transfer_config",
    ),
    _OUTPUT: (
        "aux_output_config", "enable_return_routed_experts", "return_sampling_mask",
        "skip_tokenizer_init", "tokens_only",
    ),
}  # fmt: skip

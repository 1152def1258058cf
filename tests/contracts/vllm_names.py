"""This module lists every name of vLLM that serve_app imports, overrides, calls or reads, as it is in `VERSION`.

See `test_vllm_surface.py`.
"""

VERSION = "0.32.0"

CALLED = {
    # Overridden or called. `name=` has a default; parameters after `*` are given by name only.
    "vllm.engine.arg_utils": """
        AsyncEngineArgs.create_engine_config(self, usage_context=, headless=)
        AsyncEngineArgs.create_model_config(self)""",
    "vllm.engine.protocol": """
        EngineClient.abort(self, request_id)
        EngineClient.check_admission(self, n=, request_id=)
        EngineClient.generate(self, prompt, sampling_params, request_id, *, prompt_text=, lora_request=, tokenization_kwargs=,
            trace_headers=, priority=, data_parallel_rank=, session_id=, kv_hints=, reasoning_ended=,
            reasoning_parser_kwargs=)""",
    "vllm.entrypoints.launchers.api_server.app_state": "init_app_state(engine_client, state, args, supported_tasks=)",
    "vllm.entrypoints.launchers.app": "build_app(args, supported_tasks=, model_config=)",
    "vllm.entrypoints.launchers.cli_args": "make_arg_parser(parser)",
    "vllm.entrypoints.openai.chat_completion.api_router": "create_chat_completion(request, raw_request)",
    "vllm.entrypoints.openai.chat_completion.serving": "OpenAIServingChat.create_chat_completion(self, request, raw_request=)",
    "vllm.entrypoints.openai.completion.api_router": "create_completion(request, raw_request)",
    "vllm.entrypoints.openai.completion.serving": "OpenAIServingCompletion.create_completion(self, request, raw_request=)",
    "vllm.entrypoints.openai.models.serving": "OpenAIServingModels.show_available_models(self)",
    "vllm.entrypoints.serve.exception_handling.error_response": "create_error_response(message, err_type=, status_code=, param=)",
    "vllm.envs": "enable_envs_cache()",
    "vllm.exceptions": "GracefulHTTPError.__init__(self, message, http_status) GenerationError.__init__(self, message=)",
    "vllm.inputs": "tokens_input(prompt_token_ids, *, prompt=, cache_salt=)",
    "vllm.logger": "init_logger(name)",
    "vllm.model_executor.models.registry": "_run_in_subprocess(fn)",
    "vllm.renderers.online_renderer": "OnlineRenderer.create_error_response(self, message, err_type=, status_code=, param=)",
    "vllm.renderers": """
        BaseRenderer._tokenize_prompt(self, prompt, params)
        BaseRenderer._wants_offsets(self, prompt, params)
        BaseRenderer.get_eos_token_id(self)
        BaseRenderer.get_tokenizer(self)
        BaseRenderer.render_chat_async(self, conversations, chat_params, tok_params=, *, prompt_extras=, skip_mm_cache=)
        BaseRenderer.render_cmpl_async(self, prompts, tok_params=, *, prompt_extras=, skip_mm_cache=)
        BaseRenderer.validate_token_ids(self, token_ids, *, parameter=)""",
    "vllm.renderers.chat_utils": "load_chat_template(chat_template, *, is_literal=)",
    "vllm.renderers.hf": "safe_apply_chat_template(model_config, tokenizer, conversation, *, tools=, chat_template=, tokenize=, **kwargs)",
    "vllm.renderers.params": """
        TokenizeParams.get_encode_kwargs(self)
        TokenizeParams.with_kwargs(self, **tokenization_kwargs)""",
    "vllm.config": "ModelConfig.get_vocab_size(self)",
    "vllm.tokenizers": "cached_tokenizer_from_config(model_config, **kwargs)",
    "vllm.transformers_utils.config": """
        get_config(model, trust_remote_code, revision=, code_revision=, config_format=, hf_overrides_kw=, hf_overrides_fn=, **kwargs)
        maybe_register_config_serialize_by_value()""",
    "vllm.utils": "length_from_prompt_token_ids_or_embeds(prompt_token_ids, prompt_embeds) random_uuid()",
    "vllm.utils.async_utils": "make_async(func, executor=)",
    "vllm.utils.mistral": "is_mistral_tokenizer(obj)",
    "vllm.v1.structured_output.backend_guidance": "has_guidance_unsupported_json_features(schema)",
    "vllm.v1.structured_output.backend_xgrammar": """
        has_xgrammar_unsupported_json_features(schema) validate_xgrammar_grammar(sampling_params)""",
    "vllm.v1.structured_output.request": "get_structured_output_key(params)",
    "vllm.v1.structured_output.utils": "choice_as_grammar(choice) grammar_is_likely_lark(grammar_str)",
    "vllm.v1.engine.async_llm": """
        AsyncLLM.add_request(self, request_id, prompt, params, arrival_time=, lora_request=, tokenization_kwargs=, trace_headers=,
            priority=, data_parallel_rank=, session_id=, prompt_text=, reasoning_ended=, reasoning_parser_kwargs=, kv_hints=)
        AsyncLLM.from_vllm_config(cls, vllm_config, start_engine_loop=, usage_context=, stat_loggers=, enable_log_requests=,
            aggregate_engine_logging=, disable_log_stats=, client_addresses=, client_count=, client_index=)""",
    "vllm.v1.engine.core": """
        EngineCoreProc.__init__(self, vllm_config, local_client, handshake_address, executor_class, log_stats,
            client_handshake_address=, tensor_queue=, *, engine_index=)
        EngineCoreProc._handle_request_preproc_error(self, request)
        EngineCoreProc._initialize_kv_caches(self, vllm_config)
        EngineCoreProc._make_ready_response(self)
        EngineCoreProc._perform_handshakes(self, handshake_address, identity, local_client, vllm_config,
            client_handshake_address)
        EngineCoreProc._process_engine_step(self)
        EngineCoreProc.abort_requests(self, request_ids)
        EngineCoreProc.add_request(self, request, request_wave=)
        EngineCoreProc.get_supported_tasks(self)
        EngineCoreProc.collective_rpc(self, method, timeout=, args=, kwargs=)
        EngineCoreProc.is_sleeping(self)
        EngineCoreProc.sleep(self, level=, mode=)
        EngineCoreProc.wake_up(self, tags=)
        EngineCoreProc.log_error_detail(self, scheduler_output)
        EngineCoreProc.post_step(self, model_executed)
        EngineCoreProc.preprocess_add_request(self, request)
        EngineCoreProc.process_input_sockets(self, input_addresses, coord_input_address, identity, ready_event)
        EngineCoreProc.process_output_sockets(self, output_paths, coord_output_path, engine_index)
        EngineCoreProc.reset_prefix_cache(self, reset_running_requests=, reset_connector=)
        EngineCoreProc.run_busy_loop(self)""",
    "vllm.v1.core.sched.scheduler": """
        Scheduler._free_blocks(self, request)
        Scheduler._free_request(self, request, delay_free_blocks=)
        Scheduler._update_from_kv_xfer_finished(self, kv_connector_output)
        Scheduler.finish_requests(self, request_ids, finished_status)
        Scheduler.update_from_output(self, scheduler_output, model_runner_output)""",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler": """
        NixlPullConnectorScheduler.update_state_after_alloc(self, request, blocks, num_external_tokens)""",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": """
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        KVConnectorBase_V1.build_connector_meta(self, scheduler_output)
        KVConnectorBase_V1.get_num_new_matched_tokens(self, request, num_computed_tokens)
        KVConnectorBase_V1.request_finished(self, request, block_ids)
        KVConnectorBase_V1.save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs)
        KVConnectorBase_V1.start_load_kv(self, forward_context, **kwargs)
        KVConnectorBase_V1.update_state_after_alloc(self, request, blocks, num_external_tokens)
        KVConnectorBase_V1.wait_for_layer_load(self, layer_name)
        KVConnectorBase_V1.wait_for_save(self)
        SupportsHMA.request_finished_all_groups(self, request, block_ids)""",
    "vllm.v1.core.kv_cache_manager": "KVCacheBlocks.get_unhashed_block_ids(self) KVCacheManager.get_computed_blocks(self, request)",
    "vllm.distributed.kv_events": "NullEventPublisher.publish(self, events)",
    "vllm.v1.executor.abstract": """
        Executor.get_class(vllm_config) Executor.init_kv_output_aggregator(self, connector)
        Executor.get_kv_connector_handshake_metadata(self)""",
    "vllm.v1.request": """
        Request.take_events(self)
        Request.__init__(self, request_id, prompt_token_ids, sampling_params, pooling_params, client_index=, arrival_time=,
            prompt_embeds=, prompt_is_token_ids=, mm_features=, lora_request=, cache_salt=, priority=, trace_headers=,
            block_hasher=, resumable=, session_id=, reasoning_ended=, reasoning_parser_kwargs=, abort_immediately=, kv_hints=)
        Request.append_output_token_ids(self, token_ids)""",
    "vllm.v1.structured_output": """
        StructuredOutputManager.accept_tokens(self, request, new_token_ids)
        StructuredOutputManager.grammar_init(self, request)""",
    "vllm.v1.engine.detokenizer": """
        BaseIncrementalDetokenizer.get_next_output_text(self, finished, delta)
        BaseIncrementalDetokenizer.num_output_tokens(self)
        BaseIncrementalDetokenizer.update(self, new_token_ids, stop_terminated)
        FastIncrementalDetokenizer.__init__(self, tokenizer, request)""",
    "vllm.v1.engine.output_processor": """
        OutputProcessor._update_stats_from_output(self, req_state, engine_core_output, engine_core_timestamp, iteration_stats)
        OutputProcessor.abort_requests(self, request_ids, internal)
        OutputProcessor.add_request(self, request, prompt, parent_req=, request_index=, queue=)
        RequestOutputCollector.put(self, output)""",
    "vllm.v1.executor.multiproc_executor": """
        MultiprocExecutor.__init__(self, vllm_config, monitor_workers=)
        MultiprocExecutor._ensure_worker_termination(worker_procs)
        MultiprocExecutor.start_worker_monitor(self, inline=)""",
    "vllm.v1.metrics.loggers": """
        PrometheusStatLogger.__init__(self, vllm_config, engine_indexes=)
        PrometheusStatLogger.record(self, scheduler_stats, iteration_stats, mm_cache_stats=, engine_idx=)
        unregister_vllm_metrics()""",
    "vllm.v1.outputs": """
        LogprobsLists.slice_request(self, req_idx, num_positions)
        SamplingMaskLists.slice_request(self, req_idx, num_positions)""",
    "vllm.v1.serial_utils": """
        MsgpackDecoder.__init__(self, t=, share_mem=, oob_tensor_provider=)
        MsgpackDecoder.decode(self, bufs)
        MsgpackEncoder.__init__(self, size_threshold=, oob_tensor_consumer=)
        MsgpackEncoder.encode(self, obj)""",
}

USED = {
    # Imported, with the attributes that are read: fields, members, properties, attributes that methods set.
    "vllm.config": {
        "CacheConfig": "block_size enable_prefix_caching num_gpu_blocks num_gpu_blocks_override",
        "ModelConfig": """architecture code_revision config_format hf_config_path hf_overrides hf_token is_encoder_decoder max_logprobs
            max_model_len model original_max_model_len quantization revision runner_type skip_tokenizer_init trust_remote_code""",
        "KVTransferConfig": "engine_id get_from_extra_config kv_buffer_device kv_connector kv_connector_extra_config "
        "kv_connector_module_path kv_load_failure_policy kv_role",
        "ParallelConfig": "decode_context_parallel_size pipeline_parallel_size tensor_parallel_size world_size",
        "SchedulerConfig": "disable_chunked_mm_input enable_chunked_prefill max_num_seqs",
        "KVEventsConfig": "enable_kv_cache_events publisher",
        "VllmConfig": "__post_init__ additional_config cache_config kv_events_config kv_transfer_config model_config "
        "parallel_config scheduler_config speculative_config use_v2_model_runner",
    },
    "vllm.connections": {
        "HTTPConnection": "get_async_client get_async_response get_sync_client",
        "global_http_connection": "",
    },
    "vllm.multimodal.media.connector": {
        "MEDIA_CONNECTOR_REGISTRY": "",
        "MediaConnector": "connection allowed_media_domains",
    },
    "vllm.engine.protocol": {"EngineClient": "model_config renderer"},
    "vllm.v1.worker.gpu.sample.logit_bias": {
        "MAX_NUM_ALLOWED_TOKEN_IDS": "",
        "MAX_NUM_LOGIT_BIAS_TOKENS": "",
        "MAX_NUM_STOP_TOKEN_IDS": "",
    },
    "vllm.entrypoints.anthropic.api_router": {"logger": ""},
    "vllm.entrypoints.anthropic.serving": {"logger": ""},
    "vllm.entrypoints.launchers.cli_args": {
        "BaseFrontendArgs": "",
        "FrontendArgs": """allowed_origins disable_fastapi_docs disable_uvicorn_access_log enable_log_outputs
            enable_server_load_tracking middleware""",
    },
    "vllm.entrypoints.openai.chat_completion.protocol": {"ChatCompletionRequest": ""},
    "vllm.entrypoints.openai.chat_completion.serving": {"OpenAIServingChat": "parser_cls", "logger": ""},
    "vllm.entrypoints.openai.completion.protocol": {"CompletionRequest": ""},
    "vllm.entrypoints.openai.completion.serving": {"logger": ""},
    "vllm.entrypoints.openai.models.serving": {"OpenAIServingModels": "lora_requests"},
    "vllm.entrypoints.serve.elastic_ep.middleware": {"ScalingMiddleware": ""},
    "vllm.entrypoints.serve.engine.protocol": {"ErrorInfo": "code", "ErrorResponse": "error"},
    "vllm.exceptions": {
        "GenerationError": "",
        "GracefulHTTPError": "",
        "RetryableRequestError": "",
        "VLLMClientError": "",
        "VLLMServerError": "",
        "VLLMValidationError": "parameter",
    },
    "vllm.inputs": {"TextPrompt": "prompt", "TokensPrompt": "prompt_token_ids"},
    "vllm.logprobs": {"Logprob": "logprob"},
    "vllm.config.lora": {"MaxLoRARanks": ""},
    "vllm.lora.request": {"LoRARequest": "lora_int_id lora_name lora_path base_model_name"},
    "vllm.multimodal.inputs": {"MultiModalFeatureSpec": "identifier mm_position", "PlaceholderRange": "offset"},
    "vllm.outputs": {"CompletionOutput": "finish_reason index logprobs text", "RequestOutput": "finished outputs"},
    "vllm.renderers": {"BaseRenderer": "_executor _tokenize_prompt_async default_cmpl_tok_params tokenizer"},
    "vllm.renderers.base": {"_SwappableExecutor": "_inner _max_workers replace_inner"},
    "vllm.renderers.hf": {"HfRenderer": "_apply_chat_template_async"},
    "vllm.renderers.params": {"TokenizeParams": "truncate_prompt_tokens"},
    "vllm.sampling_params": {
        "RequestOutputKind": "CUMULATIVE DELTA FINAL_ONLY",
        "SamplingParams": "all_stop_token_ids eos_token_id num_logprobs",
        "StructuredOutputsParams": "all_constraints_none",
    },
    "vllm.tokenizers.hf": {"ThreadSafeHFTokenizerMixin": ""},
    "vllm.usage.usage_lib": {"UsageContext": "OPENAI_API_SERVER"},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": "parse_args"},
    "vllm.version": {"__version__": ""},
    "vllm.v1.core.sched.output": {
        "CachedRequestData": "num_computed_tokens req_ids",
        "GrammarOutput": "grammar_bitmask structured_output_request_ids",
        "NewRequestData": "num_computed_tokens prefill_token_ids prompt_len prompt_token_ids req_id sampling_params",
        "SchedulerOutput": "finished_req_ids kv_connector_metadata has_structured_output_requests num_scheduled_tokens "
        "scheduled_cached_reqs scheduled_new_reqs total_num_scheduled_tokens",
    },
    "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": "schedule update_from_output"},
    "vllm.v1.core.sched.interface": {"PauseState": "UNPAUSED"},
    "vllm.v1.core.sched.request_queue": {"SchedulingPolicy": "PRIORITY"},
    "vllm.v1.core.sched.scheduler": {
        "Scheduler": """_holds_kv_blocks _inflight_prefills _pause_state _preempt_request _request_blocks_can_be_freed block_size
            cache_config current_step
            connector failed_recving_kv_req_ids has_mamba_layers kv_cache_config kv_cache_manager kv_event_publisher
            kv_holding_waiting lora_config
            max_num_active_reqs max_num_running_reqs max_num_scheduled_tokens
            num_waiting_for_streaming_input policy prefill_capacity_bound prefix_replay_tokens
            prev_step_scheduled_req_ids requests requires_kv_delivery
            running scheduler_config vllm_config waiting"""
    },
    "vllm.v1.engine": {
        "EngineCoreReadyResponse": "block_size max_model_len num_gpu_blocks vllm_version",
        "EngineCoreRequestType": "ABORT ADD UTILITY",
    },
    "vllm.v1.engine.async_llm": {"AsyncLLM": "logger_manager model_config output_processor", "EngineCoreClient": ""},
    "vllm.v1.engine.core": {
        "EngineCore": "add_request model_executor preprocess_add_request scheduler shutdown vllm_config",
        "EngineCoreProc": "ENGINE_CORE_DEAD aborts_queue batch_queue input_queue output_queue scheduler step_fn "
        "structured_output_manager vllm_config",
    },
    "vllm.v1.engine.core_client": {"EngineCoreClient": ""},
    "vllm.v1.engine.detokenizer": {
        "BaseIncrementalDetokenizer": "_last_output_text_offset",
        "FastIncrementalDetokenizer": "skip_special_tokens stream tokenizer",
    },
    "vllm.v1.engine.logprobs": {"LogprobsProcessor": "num_logprobs"},
    "vllm.v1.engine.output_processor": {
        "OutputProcessor": "request_states",
        "RequestOutputCollector": "output",
        "RequestState": """detokenizer is_prefilling logprobs_processor output_kind parent_req queue sent_tokens_offset
            stats stream_interval streaming_input""",
    },
    "vllm.v1.engine.parallel_sampling": {"ParentRequest": "child_requests request_id"},
    "vllm.v1.engine.utils": {"EngineZmqAddresses": "inputs outputs"},
    "vllm.v1.executor.abstract": {
        "Executor": "cache_config lora_config model_config parallel_config scheduler_config speculative_config vllm_config"
    },
    "vllm.v1.request": {
        "Request": """client_index kv_transfer_params lora_request next_decode_eligible_step num_computed_tokens num_in_flight_tokens
            num_output_placeholders num_preemptions num_prompt_tokens num_stale_output_tokens num_tokens num_tokens_with_spec priority
            prompt_token_ids request_id sampling_params status structured_output_request trace_headers""",
        "RequestStatus": "FINISHED_ABORTED FINISHED_LENGTH_CAPPED FINISHED_STOPPED PREEMPTED RUNNING WAITING WAITING_FOR_REMOTE_KVS "
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    },
    "vllm.distributed.kv_events": {
        "AllBlocksCleared": "",
        "BlockRemoved": "block_hashes medium",
        "BlockStored": "block_hashes extra_keys lora_name medium parent_block_hash token_ids",
        "KVEventBatch": "events",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": "_cache_hit_source _vllm_config",
        "KVConnectorHandshakeMetadata": "",
        "KVConnectorMetadata": "",
        "SupportsHMA": "",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector": {
        "MultiConnector": "sub_connectors",
        "MultiKVConnectorMetadata": "metadata",
        "MultiKVConnectorWorkerMetadata": "metadata",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common": {
        "OffloadingConnectorMetadata": "jobs_to_flush load_jobs store_jobs",
        "OffloadingWorkerMetadata": "mark_completed transfer_stats",
        "TransferJob": "dst_spec req_id src_spec",
        "TransferStats": "load store",
        "DirectionalTransferStats": "record",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": {"OffloadingConnector": ""},
    "vllm.v1.kv_offload.base": {"GPULoadStoreSpec": "block_ids"},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": "P2P"},
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata": {"NixlHandshakePayload": "compatibility_hash"},
    "vllm.v1.structured_output": {"StructuredOutputManager": "executor"},
    "vllm.v1.structured_output.request": {"StructuredOutputRequest": "_grammar grammar reasoning_ended reasoning_parser_kwargs"},
    "vllm.v1.kv_cache_interface": {
        "FullAttentionSpec": "block_size dtype head_size num_kv_heads",
        "KVCacheConfig": "kv_cache_groups",
        "KVCacheGroupSpec": "kv_cache_spec layer_names",
        "KVCacheSpec": "block_size page_size_bytes",
    },
    "vllm.v1.metrics.loggers": {
        "PrometheusStatLogger": "_counter_cls _gauge_cls _histogram_cls histogram_inter_token_latency",
        "StatLoggerManager": "stat_loggers",
    },
    "vllm.v1.metrics.stats": {
        "KV_FETCH_IN_PROGRESS": "",
        "PrefillStats": "num_cached_tokens num_external_cached_tokens",
        "RequestStateStats": "last_token_ts num_generation_tokens",
        "IterationStats": "inter_token_latencies_iter num_generation_tokens num_preempted_reqs",
        "SchedulerStats": "kv_cache_usage num_kv_fetch_reqs_by_stage num_running_reqs num_skipped_waiting_reqs num_waiting_reqs",
    },
    "vllm.v1.outputs": {
        "EMPTY_MODEL_RUNNER_OUTPUT": "",
        "KVConnectorOutput": "failed_recving finished_recving finished_sending kv_connector_worker_meta",
        "LogprobsTensors": "empty_cpu logprob_token_ids logprobs selected_token_ranks",
        "ModelRunnerOutput": "kv_connector_output logprobs prompt_logprobs_dict req_id_to_index req_ids sampled_token_ids",
    },
    "vllm.v1.serial_utils": {"UtilityResult": "result"},
}

EXACT = {
    # Structs that go over the wire or into a resumed attempt: all fields, in their order.
    "vllm.sampling_params.SamplingParams": """
        n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop
        stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
        logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
        include_stop_str_in_output output_kind stream_interval skip_clone output_text_buffer_length _eos_token_id
        _all_stop_token_ids _watermarking_skipped structured_outputs logit_bias allowed_token_ids extra_args bad_words
        _bad_words_token_ids skip_reading_prefix_cache thinking_token_budget repetition_detection
        routed_experts_prompt_start trace_decode_token_ids""",
    "vllm.v1.engine.EngineCoreEvent": "type timestamp",
    "vllm.v1.engine.EngineCoreEventType": "QUEUED SCHEDULED PREEMPTED",
    "vllm.v1.engine.EngineCoreOutput": """
        request_id new_token_ids new_logprobs new_prompt_logprobs_tensors pooling_output finish_reason stop_reason events
        kv_transfer_params ec_transfer_params trace_headers prefill_stats routed_experts num_nans_in_logits
        mm_cache_miss_hashes new_sampling_mask spec_decode_metrics prompt_token_id_logprobs""",
    "vllm.v1.engine.EngineCoreOutputs": """
        engine_index outputs scheduler_stats timestamp utility_output finished_requests wave_complete start_wave
        weight_version""",
    "vllm.v1.engine.EngineCoreRequest": """
        request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time lora_request cache_salt
        data_parallel_rank prompt_embeds prompt_is_token_ids client_index current_wave priority trace_headers resumable
        external_req_id reasoning_ended reasoning_parser_kwargs abort_immediately session_id kv_hints""",
    "vllm.v1.engine.FinishReason": "STOP LENGTH ABORT ERROR REPETITION",
    "vllm.v1.engine.UtilityOutput": "call_id failure_message result",
    "vllm.v1.outputs.LogprobsLists": "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens",
    "vllm.v1.outputs.SamplingMaskLists": "token_ids offsets cu_num_generated_tokens",
}

# Methods of the engine core client that AsyncLLM calls and FleetClient leaves out. No route of ours leads to them.
LEFT_OUT = """
    add_lora_async list_loras_async pin_lora_async remove_lora_async
    reset_encoder_cache_async reset_mm_cache_async reset_prefix_cache_async
    collective_rpc_async profile_async save_sharded_state_async execute_dummy_batch_async get_kv_event_sources
    sleep_async wake_up_async release_kv_cache_memory_async pause_scheduler_async resume_scheduler_async
    is_scheduler_paused_async
    compute_weight_checksums_async get_weight_version_async set_weight_version_async
    commit_elastic_ep prepare_elastic_ep handle_fault get_status"""

# Methods of the executor that the engine core calls and SimulatedExecutor does not override.
ASKED_OF_THE_EXECUTOR = """
    add_lora discard execute_dummy_batch get_kv_connector_handshake_metadata init_ec_output_aggregator
    init_kv_output_aggregator is_sleeping list_loras pin_lora profile register_failure_callback remove_lora
    reset_encoder_cache reset_mm_cache save_sharded_state set_kv_cache_layout sleep supported_tasks
    supports_draft_weight_updates take_draft_token_ids wake_up"""

ENGINE_ONLY = """
    disable_cascade_attn enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
    mm_encoder_tp_mode mm_ipc_gpu_memory_gb mm_processor_cache_type mm_processor_device mm_shm_cache_max_object_size_mb
    mm_tensor_ipc model_weights quantization quantization_config sleep_mode_offload_cudagraph sleep_preserve_parameter_names
    use_fp64_gumbel"""
"""What `create_model_config` takes and a front end does without: kernels, memory, and processes of the device."""

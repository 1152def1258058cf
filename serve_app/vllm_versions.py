"""This module knows the versions of vLLM that this source runs with: where they differ, and which of them speak with each other.

It imports none of them. vLLM's CPU build may be older than its CUDA build, so an ingress of the CPU image may have an older vLLM than the
engines of the CUDA image (ADR 56).
"""

from collections.abc import Mapping

SERVER_ARGUMENTS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
"""vLLM's module of the arguments of `vllm serve`: from 0.33 on, and before."""

_ALIKE_MEDIA = """
AriaForConditionalGeneration AudioFlamingo3ForConditionalGeneration BagelForConditionalGeneration BailingMoeV3VLForConditionalGeneration
BeeForConditionalGeneration Blip2ForConditionalGeneration CLIPModel Cohere2VisionForConditionalGeneration
CohereAsrForConditionalGeneration CohereCompassForConditionalGeneration ColQwen3 ColQwen3_5 Cosmos3ForConditionalGeneration
DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DiffusionGemmaForBlockDiffusion DotsOCRForCausalLM Eagle2_5_VLForConditionalGeneration
EmbeddingGemma2Model Ernie4_5_VLMoeForConditionalGeneration Exaone4_5_ForConditionalGeneration FunAudioChatForConditionalGeneration
Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
GLM4VForCausalLM Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmAsrForConditionalGeneration
GlmOcrForConditionalGeneration Granite4VisionForConditionalGeneration GraniteSpeechForConditionalGeneration
GraniteSpeechPlusForConditionalGeneration HCXVisionV2ForCausalLM HfMoondream Idefics3ForConditionalGeneration
InternS1ForConditionalGeneration InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
InternS2PreviewForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration IsaacForConditionalGeneration JinaVLForRanking
KananaVForConditionalGeneration KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration KimiK25ForConditionalGeneration
KimiVLForConditionalGeneration Lfm2VlForConditionalGeneration Llama4ForConditionalGeneration Llama_Nemotron_Nano_VL
LlamaNemotronVLForSequenceClassification LlamaNemotronVLModel LlavaForConditionalGeneration LlavaNextForConditionalGeneration
LlavaNextVideoForConditionalGeneration LlavaOnevision2ForConditionalGeneration LlavaOnevisionForConditionalGeneration MiDashengLMModel
MiMoV2OmniForCausalLM MiniCPMO MiniCPMV MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
Mistral3ForConditionalGeneration Molmo2ForConditionalGeneration MolmoForCausalLM Moondream3ForCausalLM MoonshotKimiaForCausalLM
NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 NVLM_D
OpenPanguVLForConditionalGeneration OpenVLAForActionPrediction OpsColQwen3Model Ovis Ovis2_5 Ovis2_6_MoeForCausalLM Ovis2_6ForCausalLM
PaliGemmaForConditionalGeneration Phi3VForCausalLM Phi4ForCausalLMV Phi4MMForCausalLM PixtralForConditionalGeneration
Qwen2_5_VLForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen2VLForConditionalGeneration Qwen3_5ForConditionalGeneration
Qwen3_5MoeForConditionalGeneration Qwen3ASRForcedAlignerForTokenClassification Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration
Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3VLNemotronEmbedModel RForConditionalGeneration SiglipModel
SkyworkR1VChatModel SmolVLMForConditionalGeneration Step3p7ForConditionalGeneration Step3VLForConditionalGeneration
StepVLForConditionalGeneration Terratorch UltravoxModel VoxtralForConditionalGeneration VoxtralRealtimeGeneration
WhisperForConditionalGeneration
"""
"""Architectures, by vLLM's names, of whose images, sound and video 0.32.0 and 0.33.0 make the same tensors."""
_OLDER_INGRESS: Mapping[tuple[str, str], frozenset[str]] = {("0.32.0", "0.33.0"): frozenset(_ALIKE_MEDIA.split())}
"""Versions of an ingress and of a newer replica that understand each other (ADR 56 says when) -> the architectures of models whose media
may be sent. `make check-cuda` tests both, and says which architectures belong here."""


def may_speak(ingress: str, replica: str) -> bool:
    """Return whether an ingress with one version of vLLM may send requests to a replica with the other."""
    return ingress == replica or (ingress, replica) in _OLDER_INGRESS


def may_send_media(architecture: str, ingress: str, replica: str) -> bool:
    """Return whether the ingress's tensors of images, sound and video are those that the replica's model reads.

    Args:
        architecture: The model's, by vLLM's name.
    """
    return ingress == replica or architecture in _OLDER_INGRESS.get((ingress, replica), ())


def refusing_media(architecture: str, ingress: str) -> str:
    """Return the newer version of vLLM whose replicas get no media of this architecture from an ingress with this version, "" if none."""
    newer = (replica for of_ingress, replica in _OLDER_INGRESS if of_ingress == ingress)
    return next((replica for replica in newer if not may_send_media(architecture, ingress, replica)), "")

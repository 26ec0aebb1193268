"""Makes the sounds of conditional models (and one model's proteins), with a prompt around them."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from zoo.conditional_inputs import AUDIO, TEXT_LENGTH, Inputs, Maker, count_features, prompt, words

FRAMES = 64  # of a spectrogram


def _with_audio(sound: Maker) -> Maker:
    """Return a maker of prompts around the sound that `sound` makes."""

    def make(model: PreTrainedModel, batch: int) -> Inputs:
        arguments = sound(model, batch)
        return prompt(model, count_features(model, arguments, batch, "audio"), batch, AUDIO) | arguments

    return make


def _spectrogram(model: PreTrainedModel, batch: int) -> Inputs:
    config = model.config.audio_config
    return {"input_features": torch.randn(batch, config.num_mel_bins, FRAMES)}


def _masked_spectrogram(model: PreTrainedModel, batch: int) -> Inputs:
    return _spectrogram(model, batch) | {"input_features_mask": torch.ones(batch, FRAMES, dtype=torch.long)}


def _granite_speech(model: PreTrainedModel, batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, FRAMES, model.config.encoder_config.input_dim)}


def _musicflamingo(model: PreTrainedModel, batch: int) -> Inputs:
    sound = _masked_spectrogram(model, batch)
    return prompt(model, FRAMES // 4, batch, AUDIO) | sound


def _qwen2_audio(model: PreTrainedModel, batch: int) -> Inputs:
    sound = _spectrogram(model, batch)
    mask = torch.ones(batch, FRAMES, dtype=torch.long)
    return prompt(model, FRAMES // 4, batch, AUDIO) | sound | {"feature_attention_mask": mask}


def _moss(model: PreTrainedModel, batch: int) -> Inputs:
    sound = _masked_spectrogram(model, batch)
    return sound | {"padding_mask": torch.ones(batch, model.config.audio_chunk_size, dtype=torch.long)}


def _waveform(model: PreTrainedModel, batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 1, 1600), "padding_mask": torch.ones(batch, 1600, dtype=torch.long)}


def _qwen3_asr(model: PreTrainedModel, batch: int) -> Inputs:
    frames = 4 * model.config.audio_config.n_window
    features = torch.randn(batch, model.config.audio_config.num_mel_bins, frames)
    return {"input_features": features, "input_features_mask": torch.ones(batch, frames, dtype=torch.long)}


def _voxtral_realtime(model: PreTrainedModel, batch: int) -> Inputs:
    # Every token, generated ones too, hears its own stretch of the sound; this one suffices for 64 in all.
    mel = torch.randn(batch, model.config.audio_config.num_mel_bins, 64 * model.config.audio_length_per_tok)
    return prompt(model, 0, batch) | {"input_features": mel}


def _vibevoice_asr(model: PreTrainedModel, batch: int) -> Inputs:
    sound = {"input_values": torch.randn(batch, 1, 64)}
    if "sample" in inspect.signature(model.forward).parameters:
        sound["sample"] = torch.tensor(False)  # or it adds fresh noise to what it hears on every call
    return sound


def _nemo_speechlm(model: PreTrainedModel, batch: int) -> Inputs:
    mel = torch.randn(batch, FRAMES, model.config.audio_config.asr_config.num_mel_bins)
    return {"input_features": mel, "input_features_mask": torch.ones(batch, FRAMES, dtype=torch.long)}


def _whisper(model: PreTrainedModel, batch: int) -> Inputs:
    config = model.config
    return {"input_features": torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)}


def _speech_to_text(model: PreTrainedModel, batch: int) -> Inputs:
    mask = torch.ones(batch, 48, dtype=torch.long)
    mask[1:, 32:] = 0
    return {"input_features": torch.randn(batch, 48, model.config.input_feat_per_channel), "attention_mask": mask}


def _evolla(model: PreTrainedModel, batch: int) -> Inputs:
    proteins = torch.stack([words(TEXT_LENGTH) for _ in range(batch)])
    protein = {"protein_input_ids": proteins, "protein_attention_mask": torch.ones_like(proteins)}
    return prompt(model, 0, batch) | protein


SOUND_MAKERS: dict[str, Maker] = {
    "audioflamingo3": _with_audio(_masked_spectrogram),
    "evolla": _evolla,
    "glmasr": _with_audio(_masked_spectrogram),
    "granite_speech": _with_audio(_granite_speech),
    "granite_speech_plus": _with_audio(_granite_speech),
    "moss_transcribe_diarize": _with_audio(_moss),
    "musicflamingo": _musicflamingo,
    "nemo_speechlm": _with_audio(_nemo_speechlm),
    "omniasr": _with_audio(_waveform),
    "qwen2_audio": _qwen2_audio,
    "qwen3_asr": _with_audio(_qwen3_asr),
    "speech_to_text": _speech_to_text,
    "vibevoice_asr": _with_audio(_vibevoice_asr),
    "voxtral": _with_audio(_spectrogram),
    "voxtral_realtime": _voxtral_realtime,
    "whisper": _whisper,
}

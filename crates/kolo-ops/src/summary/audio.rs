//! `AudioSummaryV2`: sounds, as WAV files of 16 bits.

use kolo_core::{Error, Result, Tensor};
use kolo_graph::{Gradient, OpDef, Output, shape_fns};

use super::proto::{Audio, Content, Summary, Value};
use super::{scalar_tag, tag_text};
use crate::op::{Gpu, Op, cpu_any};
use crate::{Cost, KernelCtx};

/// A summary of the first `max_outputs` sounds of `clips`, `[n, frames]` or `[n, frames, channels]` from -1 to 1, under `tag`.
#[track_caller]
pub fn audio_summary<'g>(
    tag: Output<'g>,
    clips: Output<'g>,
    sample_rate: Output<'g>,
    max_outputs: usize,
) -> Output<'g> {
    let builder = tag.graph().op("AudioSummaryV2").inputs([tag, clips, sample_rate]);
    builder.attr("max_outputs", i64::try_from(max_outputs).unwrap_or(i64::MAX)).out()
}

pub(crate) static AUDIO_SUMMARY_V2: Op = Op {
    def: OpDef {
        name: "AudioSummaryV2",
        signature: "(tag:string, tensor:float, sample_rate:float) -> (summary:string) ; max_outputs:int>=1=3",
        shape: shape_fns::scalars,
        gradient: Gradient::None("a summary"),
        ..OpDef::BASE
    },
    kernels: &[cpu_any(summarize)],
    gpu: Gpu::Never("summaries are written in host memory"),
    cost: Cost::Elements,
};

fn summarize(ctx: &mut KernelCtx<'_>) -> Result<()> {
    let tag = tag_text(scalar_tag(ctx.input(0)?, "tag must be scalar")?)?;
    let max_outputs = usize::try_from(ctx.attrs().int("max_outputs")?).unwrap_or(0);
    let values = clips(&tag, ctx.input(1)?, ctx.scalar::<f32>(2)?, max_outputs)?;
    ctx.set_output(0, Summary::from(values).to_tensor());
    Ok(())
}

fn clips(tag: &str, tensor: &Tensor, sample_rate: f32, max_outputs: usize) -> Result<Vec<Value>> {
    let (n, frames, channels) = match *tensor.shape().dims() {
        [n, frames] => (n, frames, 1),
        [n, frames, channels] => (n, frames, channels),
        _ => {
            return Err(Error::invalid_argument(format!("Tensor must be 3-D or 2-D, got: {}", tensor.shape())));
        }
    };
    if sample_rate.is_nan() || sample_rate <= 0.0 {
        return Err(Error::invalid_argument("sample_rate must be > 0"));
    }
    let samples = tensor.data::<f32>()?;
    let mut values = Vec::new();
    for i in 0..n.min(max_outputs) {
        let clip = &samples[i * frames * channels..(i + 1) * frames * channels];
        let audio = Audio {
            sample_rate,
            num_channels: channels as i64,
            length_frames: frames as i64,
            encoded_audio_string: wav(clip, channels, sample_rate)?,
            content_type: "audio/wav".to_owned(),
        };
        let tag = if max_outputs > 1 { format!("{tag}/audio/{i}") } else { format!("{tag}/audio") };
        values.push(Value::new(tag, Content::Audio(audio)));
    }
    Ok(values)
}

/// Bytes of a sample.
const WIDTH: u32 = 2;

/// A WAV file: a header that says how to read the samples, and the samples.
fn wav(samples: &[f32], channels: usize, sample_rate: f32) -> Result<Vec<u8>> {
    let too_large = || Error::invalid_argument("the sound is too large for a WAV file");
    let channels = u16::try_from(channels).ok().filter(|&n| n > 0);
    let channels = channels.ok_or_else(|| Error::invalid_argument("audio must have 1 to 65535 channels"))?;
    if samples.is_empty() {
        return Err(Error::invalid_argument("audio must have at least one frame"));
    }
    let data_bytes = u32::try_from(samples.len()).ok().and_then(|n| n.checked_mul(WIDTH)).ok_or_else(too_large)?;
    let rate = sample_rate as u32;
    let frame = u32::from(channels) * WIDTH;
    let mut file = Vec::with_capacity(44 + data_bytes as usize);
    file.extend(b"RIFF");
    file.extend(data_bytes.checked_add(36).ok_or_else(too_large)?.to_le_bytes());
    file.extend(b"WAVEfmt ");
    file.extend(16u32.to_le_bytes());
    file.extend(1u16.to_le_bytes());
    file.extend(channels.to_le_bytes());
    file.extend(rate.to_le_bytes());
    file.extend(rate.checked_mul(frame).ok_or_else(too_large)?.to_le_bytes());
    file.extend((frame as u16).to_le_bytes());
    file.extend((8 * WIDTH as u16).to_le_bytes());
    file.extend(b"data");
    file.extend(data_bytes.to_le_bytes());
    file.extend(samples.iter().flat_map(|x| ((x * 32768.0).round() as i16).to_le_bytes()));
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check_op, tensor};

    #[test]
    fn a_sound_is_a_wav_file() {
        let file = wav(&[0.0, 0.5, -1.0, 2.0], 2, 8000.0).unwrap();
        assert_eq!(file.len(), 44 + 8);
        assert_eq!(&file[..4], b"RIFF");
        assert_eq!(file[22..24], 2u16.to_le_bytes());
        assert_eq!(file[24..32], [8000u32.to_le_bytes(), 32_000u32.to_le_bytes()].concat());
        // Louder than loudest is loudest.
        assert_eq!(file[44..], [0i16, 16_384, -32_768, 32_767].map(i16::to_le_bytes).concat());
    }

    #[test]
    fn bad_sounds_are_refused() {
        let case = |clips: Tensor, rate: f32| check_op("AudioSummaryV2").input("t").input(clips).input(rate);
        case(Tensor::from([1.0f32]), 8000.0).fails("Tensor must be 3-D or 2-D");
        case(tensor([1, 1], [1.0f32]), 0.0).fails("sample_rate must be > 0");
        case(tensor([1, 1], [1.0f32]), f32::NAN).fails("sample_rate must be > 0");
        case(tensor::<f32, 3>([1, 4, 0], []), 8000.0).fails("channels");
        case(tensor([1, 1], [1.0f32]), 4e9).fails("too large");
    }
}

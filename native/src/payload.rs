//! Token ids of an engine's events, from an integer of msgpack each to one string of bytes.
//!
//! A payload is `[ts, [event, ...], ...]` with events as maps (docs/engine-facts/vllm.md#event-frames,
//! docs/engine-facts/sglang.md#event-frames). Only the values of their key `token_ids` change; all other bytes are copied
//! and validated by the decoder.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

const KEY: &[u8] = b"token_ids";

/// First byte of an unsigned integer -> bytes that hold its value; 0 for everything else.
const SIZES: [u8; 256] = {
    let mut sizes = [0; 256];
    let mut tag = 0;
    while tag < 0x80 {
        sizes[tag] = 1; // the value is the byte itself
        tag += 1;
    }
    (sizes[0xcc], sizes[0xcd], sizes[0xce], sizes[0xcf]) = (1, 2, 4, 8);
    sizes
};

/// Return a payload in which every event's token ids are a `bin` of `width` bytes each, little-endian.
///
/// `None`: nothing to change, or the payload has something that no engine sends, such as an id that does not fit.
#[pyfunction]
#[pyo3(signature = (payload, width, /))]
pub fn pack_token_ids<'py>(py: Python<'py>, payload: &[u8], width: usize) -> Option<Bound<'py, PyBytes>> {
    let packed = match width {
        4 => packed::<4>(payload),
        8 => packed::<8>(payload),
        _ => None,
    };
    packed.map(|packed| PyBytes::new(py, &packed))
}

fn packed<const WIDTH: usize>(raw: &[u8]) -> Option<Vec<u8>> {
    let mut from = Reader { raw, at: 0 };
    let mut out = Vec::new();
    let mut done = 0; // bytes of the payload that are in `out`, in their old or new form
    if from.array()? < 2 {
        return None;
    }
    from.skip()?;
    for _ in 0..from.array()? {
        for _ in 0..from.map()? {
            if from.text()? != KEY {
                from.skip()?;
                continue;
            }
            let before = from.at;
            let count = from.array()?;
            if count > raw.len() - from.at {
                return None; // an id has a byte at least
            }
            let length = u32::try_from(WIDTH * count).ok()?;
            out.reserve(raw.len() - done + WIDTH * count + 5);
            out.extend_from_slice(&raw[done..before]);
            out.push(0xc6);
            out.extend_from_slice(&length.to_be_bytes());
            let ids = out.len();
            out.resize(ids + WIDTH * count, 0);
            for slot in out[ids..].chunks_exact_mut(WIDTH) {
                let id = from.unsigned()?;
                if WIDTH < 8 && id >> (8 * WIDTH) != 0 {
                    return None;
                }
                slot.copy_from_slice(&id.to_le_bytes()[..WIDTH]);
            }
            done = from.at;
        }
    }
    if done == 0 {
        return None;
    }
    out.extend_from_slice(&raw[done..]);
    Some(out)
}

/// Reads msgpack. Every method returns `None` at the end of the bytes, and for a value of another type.
struct Reader<'a> {
    raw: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    #[inline]
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let taken = self.raw.get(self.at..)?.get(..count)?;
        self.at += count;
        Some(taken)
    }

    #[inline]
    fn byte(&mut self) -> Option<u8> {
        let byte = *self.raw.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    /// Big-endian, as all numbers of msgpack.
    #[inline]
    fn number<const N: usize>(&mut self) -> Option<u64> {
        let mut bytes = [0; 8];
        bytes[8 - N..].copy_from_slice(self.take(N)?);
        Some(u64::from_be_bytes(bytes))
    }

    /// Read one unsigned integer without a branch on its length: lengths of token ids follow no pattern, and a branch
    /// misprediction costs more than all other steps.
    #[inline]
    fn unsigned(&mut self) -> Option<u64> {
        let tag = *self.raw.get(self.at)?;
        let size = SIZES[usize::from(tag)];
        let start = self.at + usize::from(tag >= 0x80);
        let word = match self.raw.get(start..start + 8) {
            Some(word) => u64::from_be_bytes(word.try_into().ok()?),
            None => {
                let rest = self.raw.get(start..)?; // the payload ends within 8 bytes: the missing ones stay zero
                let mut word = [0; 8];
                word[..rest.len()].copy_from_slice(rest);
                u64::from_be_bytes(word)
            }
        };
        self.at = start + usize::from(size);
        if size == 0 || self.at > self.raw.len() {
            return None;
        }
        Some(word >> (64 - 8 * u32::from(size)))
    }

    fn array(&mut self) -> Option<usize> {
        let count = match self.byte()? {
            small @ 0x90..=0x9f => u64::from(small & 0x0f),
            0xdc => self.number::<2>()?,
            0xdd => self.number::<4>()?,
            _ => return None,
        };
        usize::try_from(count).ok()
    }

    fn map(&mut self) -> Option<usize> {
        let count = match self.byte()? {
            small @ 0x80..=0x8f => u64::from(small & 0x0f),
            0xde => self.number::<2>()?,
            0xdf => self.number::<4>()?,
            _ => return None,
        };
        usize::try_from(count).ok()
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let length = match self.byte()? {
            small @ 0xa0..=0xbf => u64::from(small & 0x1f),
            0xd9 => self.number::<1>()?,
            0xda => self.number::<2>()?,
            0xdb => self.number::<4>()?,
            _ => return None,
        };
        self.take(usize::try_from(length).ok()?)
    }

    /// Skip one value with its contents, without recursion: the decoder limits the nesting.
    fn skip(&mut self) -> Option<()> {
        let mut left = 1u64;
        while left > 0 {
            left -= 1;
            let (more, bytes) = match self.byte()? {
                0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => (0, 0),
                small @ 0x80..=0x8f => (2 * u64::from(small & 0x0f), 0),
                small @ 0x90..=0x9f => (u64::from(small & 0x0f), 0),
                small @ 0xa0..=0xbf => (0, u64::from(small & 0x1f)),
                0xc4 | 0xd9 => (0, self.number::<1>()?),
                0xc5 | 0xda => (0, self.number::<2>()?),
                0xc6 | 0xdb => (0, self.number::<4>()?),
                0xcc | 0xd0 => (0, 1),
                0xcd | 0xd1 => (0, 2),
                0xca | 0xce | 0xd2 => (0, 4),
                0xcb | 0xcf | 0xd3 => (0, 8),
                0xdc => (self.number::<2>()?, 0),
                0xdd => (self.number::<4>()?, 0),
                0xde => (2 * self.number::<2>()?, 0),
                0xdf => (2 * self.number::<4>()?, 0),
                0xc1 | 0xc7..=0xc9 | 0xd4..=0xd8 => return None, // extensions, and a byte that means nothing
            };
            left = left.checked_add(more)?;
            self.take(usize::try_from(bytes).ok()?)?;
        }
        Some(())
    }
}

//! The loop of `mmrouter_lib.block_keys.chain`: a key is XXH3-64 of a block's bytes and extras, seeded by the key before it.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Return the keys of `blocks` blocks of `ids`, 8 bytes each, little-endian; `None` for arguments that are no blocks.
///
/// `extras`: block number -> bytes hashed after its ids.
#[pyfunction]
#[pyo3(signature = (ids, block_size, blocks, extras, parent, /))]
pub fn chain<'py>(
    py: Python<'py>,
    ids: &Bound<'py, PyAny>,
    block_size: isize,
    blocks: isize,
    extras: &Bound<'py, PyDict>,
    parent: u64,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let buffer = PyUntypedBuffer::get(ids)?;
    let (Ok(block_size), Ok(blocks)) = (usize::try_from(block_size), usize::try_from(blocks)) else {
        return Ok(None);
    };
    let Some(width) = block_size.checked_mul(buffer.item_size()) else {
        return Ok(None);
    };
    if width == 0
        || blocks == 0
        || !buffer.is_c_contiguous()
        || width.checked_mul(blocks).is_none_or(|all| all > buffer.len_bytes())
    {
        return Ok(None);
    }
    // SAFETY: the buffer is contiguous and has this many bytes. They are neither moved nor freed while it is held, and
    // no other thread writes to them, because this one holds the interpreter until it returns.
    let raw = unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), width * blocks) };
    let Some(extras) = in_order(extras, blocks)? else {
        return Ok(None);
    };
    PyBytes::new_with(py, 8 * blocks, |out| {
        fill(raw, width, &extras, parent, out);
        Ok(())
    })
    .map(Some)
}

/// Block number and extras.
type Extra<'py> = (usize, Bound<'py, PyBytes>);

/// Return the extras in the order of their blocks, or `None` where one has no block.
fn in_order<'py>(extras: &Bound<'py, PyDict>, blocks: usize) -> PyResult<Option<Vec<Extra<'py>>>> {
    let mut ordered = Vec::with_capacity(extras.len());
    for (number, extra) in extras {
        match (
            number.extract::<isize>().map(usize::try_from),
            extra.cast_into::<PyBytes>(),
        ) {
            (Ok(Ok(number)), Ok(extra)) if number < blocks => ordered.push((number, extra)),
            _ => return Ok(None),
        }
    }
    ordered.sort_unstable_by_key(|&(number, _)| number);
    Ok(Some(ordered))
}

fn fill(raw: &[u8], width: usize, extras: &[Extra<'_>], parent: u64, out: &mut [u8]) {
    let mut key = parent;
    let mut extras = extras.iter().peekable();
    let mut whole = Vec::new();
    for (number, (block, out)) in raw.chunks_exact(width).zip(out.chunks_exact_mut(8)).enumerate() {
        key = match extras.next_if(|&&(of, _)| of == number) {
            None => xxh3_64_with_seed(block, key),
            Some((_, extra)) => {
                whole.clear();
                whole.extend_from_slice(block);
                whole.extend_from_slice(extra.as_bytes());
                xxh3_64_with_seed(&whole, key)
            }
        };
        out.copy_from_slice(&key.to_le_bytes());
    }
}

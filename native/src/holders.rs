//! The table of `mmrouter_router.fleet.holder_table`: block key -> the slots that hold the block.
//!
//! Keys are hashes already, so their bits place them: the upper ones in a shard, the lower ones within it. A shard grows
//! and is wiped as a whole, and shards grow at different fill levels, so no call moves the whole table. Equal sets of
//! slots are stored once. Consecutive blocks of a prompt mostly have the same holders, so the loops compute a set once
//! per run of blocks.

use std::collections::HashMap;
use std::hint::black_box;
use std::mem;
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PySet};

const SHARDS: usize = 256;
const SMALLEST: usize = 4; // entries of a shard
const BATCH: usize = 32; // keys whose entries are fetched together
const MAX_SHARED: usize = 65_536; // sets that are found again; beyond it sharing starts anew, at a cost in memory only

type SetId = u32;
const NO_HOLDER: SetId = 0;

#[derive(Clone, Copy)]
#[repr(C, packed(4))] // 12 bytes instead of 16
struct Entry {
    key: u64,
    set: SetId,
}

const VACANT: Entry = Entry { key: 0, set: NO_HOLDER };

/// A hash table with linear probing, of which at least a quarter is vacant. Its size is a power of two.
struct Shard {
    entries: Vec<Entry>,
    used: usize,
    limit: usize, // of `used`, per 1024 entries
}

impl Shard {
    fn new(number: usize) -> Self {
        let limit = 512 + 256 * number / SHARDS;
        Shard {
            entries: vec![VACANT; SMALLEST],
            used: 0,
            limit,
        }
    }

    #[inline]
    fn home(&self, key: u64) -> usize {
        key as usize & (self.entries.len() - 1)
    }

    /// Return the position of a key, or of the vacant entry where it belongs.
    #[inline]
    fn find(&self, key: u64) -> usize {
        let mut at = self.home(key);
        loop {
            let entry = self.entries[at];
            if entry.set == NO_HOLDER || entry.key == key {
                return at;
            }
            at = (at + 1) & (self.entries.len() - 1);
        }
    }

    fn is_full(&self, used: usize) -> bool {
        1024 * used > self.limit * self.entries.len()
    }

    /// Fill a vacant entry. Positions are invalid afterwards.
    fn insert(&mut self, at: usize, key: u64, set: SetId) {
        self.entries[at] = Entry { key, set };
        self.used += 1;
        if self.is_full(self.used) {
            self.rebuild();
        }
    }

    fn vacate(&mut self, at: usize) {
        let mask = self.entries.len() - 1;
        let (mut hole, mut at) = (at, at);
        self.used -= 1;
        loop {
            at = (at + 1) & mask;
            let entry = self.entries[at];
            if entry.set == NO_HOLDER {
                break;
            }
            // An entry is found only if no vacant one lies between its home and its place.
            let from_home = at.wrapping_sub(self.home(entry.key)) & mask;
            if from_home >= (at.wrapping_sub(hole) & mask) {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = VACANT;
    }

    /// Place all entries anew, in the least size that has room for one more.
    fn rebuild(&mut self) {
        let old = mem::take(&mut self.entries);
        self.used = old.iter().filter(|entry| entry.set != NO_HOLDER).count();
        let mut size = SMALLEST;
        while 1024 * (self.used + 1) > self.limit * size {
            size *= 2;
        }
        self.entries = vec![VACANT; size];
        for entry in old {
            if entry.set != NO_HOLDER {
                let at = self.find(entry.key);
                self.entries[at] = entry;
            }
        }
    }
}

/// A set of slots as words of 64 bits, without zero words at its end, and how many keys have it.
struct Set {
    words: Arc<[u64]>,
    keys: u32,
}

/// Sets by their id, which is given to another set when no key has it any more. Id 0 is the empty set.
struct Sets {
    by_id: Vec<Set>,
    shared: HashMap<Arc<[u64]>, SetId>,
    free: Vec<SetId>,
}

impl Sets {
    fn new() -> Self {
        let none = Set {
            words: Arc::from([]),
            keys: 0,
        };
        Sets {
            by_id: vec![none],
            shared: HashMap::new(),
            free: Vec::new(),
        }
    }

    #[inline]
    fn words(&self, id: SetId) -> &[u64] {
        &self.by_id[id as usize].words
    }

    fn has(&self, id: SetId, slot: usize) -> bool {
        self.words(id)
            .get(slot / 64)
            .is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    fn with(&mut self, id: SetId, slot: usize) -> SetId {
        let mut words = self.words(id).to_vec();
        if words.len() <= slot / 64 {
            words.resize(slot / 64 + 1, 0);
        }
        words[slot / 64] |= 1 << (slot % 64);
        self.id_of(words)
    }

    fn without(&mut self, id: SetId, slots: &[u64]) -> SetId {
        let mut words = self.words(id).to_vec();
        for (word, gone) in words.iter_mut().zip(slots) {
            *word &= !gone;
        }
        self.id_of(words)
    }

    /// Return the id of a set; one that no key has yet is valid until the next call.
    fn id_of(&mut self, mut words: Vec<u64>) -> SetId {
        while words.last() == Some(&0) {
            words.pop();
        }
        if words.is_empty() {
            return NO_HOLDER;
        }
        if let Some(&id) = self.shared.get(words.as_slice()) {
            return id;
        }
        if self.shared.len() >= MAX_SHARED {
            self.shared.clear();
        }
        let set = Set {
            words: Arc::from(words),
            keys: 0,
        };
        let words = Arc::clone(&set.words);
        let id = match self.free.pop() {
            Some(id) => {
                self.by_id[id as usize] = set;
                id
            }
            None => {
                self.by_id.push(set);
                (self.by_id.len() - 1) as SetId
            }
        };
        self.shared.insert(words, id);
        id
    }

    /// Note that a key has a set instead of another one.
    #[inline]
    fn replace(&mut self, old: SetId, new: SetId) {
        if new != NO_HOLDER {
            self.by_id[new as usize].keys += 1;
        }
        if old != NO_HOLDER {
            self.by_id[old as usize].keys -= 1;
            if self.by_id[old as usize].keys == 0 {
                self.release(old);
            }
        }
    }

    fn release(&mut self, id: SetId) {
        let none = Arc::clone(&self.by_id[NO_HOLDER as usize].words);
        let words = mem::replace(&mut self.by_id[id as usize].words, none);
        if self.shared.get(&words) == Some(&id) {
            self.shared.remove(&words);
        }
        self.free.push(id);
    }
}

/// Block key -> slots that hold it; see the Python class of this name.
#[pyclass(module = "mmrouter_native")]
pub struct HolderTable {
    shards: Vec<Shard>,
    sets: Sets,
    wiped: Vec<u64>, // slots that are being wiped
    next: usize,     // shard to wipe
}

impl HolderTable {
    #[inline]
    fn number(key: u64) -> usize {
        (key >> 56) as usize
    }

    #[inline]
    fn set_of(&self, key: u64) -> SetId {
        let shard = &self.shards[Self::number(key)];
        shard.entries[shard.find(key)].set
    }

    /// Read where the search for each key begins. Their cache misses overlap, as none depends on another.
    #[inline]
    fn fetch(&self, keys: &[u64]) {
        let mut read = 0;
        for &key in keys {
            let shard = &self.shards[Self::number(key)];
            read |= shard.entries[shard.home(key)].set;
        }
        black_box(read);
    }

    fn add_all(&mut self, slot: usize, keys: &[u64]) -> usize {
        let (mut added, mut seen) = (0, None);
        for keys in keys.chunks(BATCH) {
            self.fetch(keys);
            for &key in keys {
                let shard = &mut self.shards[Self::number(key)];
                let at = shard.find(key);
                let have = shard.entries[at].set;
                let joined = match seen {
                    Some((set, joined)) if set == have => joined,
                    _ if self.sets.has(have, slot) => have,
                    _ => self.sets.with(have, slot),
                };
                seen = Some((have, joined));
                if joined == have {
                    continue;
                }
                self.sets.replace(have, joined);
                added += 1;
                if have == NO_HOLDER {
                    shard.insert(at, key, joined);
                } else {
                    shard.entries[at].set = joined;
                }
            }
        }
        added
    }

    fn discard_all(&mut self, slot: usize, keys: &[u64]) -> usize {
        let mut gone = vec![0; slot / 64 + 1];
        gone[slot / 64] = 1 << (slot % 64);
        let (mut removed, mut seen) = (0, None);
        for keys in keys.chunks(BATCH) {
            self.fetch(keys);
            for &key in keys {
                let shard = &mut self.shards[Self::number(key)];
                let at = shard.find(key);
                let have = shard.entries[at].set;
                let rest = match seen {
                    Some((set, rest)) if set == have => rest,
                    _ if !self.sets.has(have, slot) => have,
                    _ => self.sets.without(have, &gone),
                };
                seen = Some((have, rest));
                if rest == have {
                    continue;
                }
                self.sets.replace(have, rest);
                removed += 1;
                if rest == NO_HOLDER {
                    shard.vacate(at);
                } else {
                    shard.entries[at].set = rest;
                }
            }
        }
        removed
    }

    /// Return the leading keys held, by slot, for the slots of a mask with `overlap.len()` bits at the most.
    fn leading_of(&self, keys: &[u64], mut alive: Vec<u64>, overlap: &mut [u32]) {
        let (mut depth, mut seen) = (0, NO_HOLDER);
        'prompt: for keys in keys.chunks(BATCH) {
            self.fetch(keys);
            for &key in keys {
                let set = self.set_of(key);
                if set == NO_HOLDER {
                    break 'prompt;
                }
                if set != seen {
                    seen = set;
                    let words = self.sets.words(set);
                    let mut left = 0;
                    for (number, alive) in alive.iter_mut().enumerate() {
                        let still = *alive & words.get(number).copied().unwrap_or(0);
                        write_bits(*alive ^ still, number, depth, overlap);
                        *alive = still;
                        left |= still;
                    }
                    if left == 0 {
                        return;
                    }
                }
                depth += 1;
            }
        }
        for (number, &alive) in alive.iter().enumerate() {
            write_bits(alive, number, depth, overlap);
        }
    }
}

#[inline]
fn write_bits(mut word: u64, number: usize, depth: u32, overlap: &mut [u32]) {
    while word != 0 {
        overlap[64 * number + word.trailing_zeros() as usize] = depth;
        word &= word - 1;
    }
}

#[pymethods]
impl HolderTable {
    #[new]
    fn new() -> Self {
        let shards = (0..SHARDS).map(Shard::new).collect();
        HolderTable {
            shards,
            sets: Sets::new(),
            wiped: Vec::new(),
            next: SHARDS,
        }
    }

    fn __len__(&self) -> usize {
        self.shards.iter().map(|shard| shard.used).sum()
    }

    #[pyo3(signature = (slot, keys, /))]
    fn add(&mut self, slot: usize, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.add_all(slot, &numbers(keys)?))
    }

    #[pyo3(signature = (slot, keys, /))]
    fn discard(&mut self, slot: usize, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.discard_all(slot, &numbers(keys)?))
    }

    #[pyo3(signature = (keys, /))]
    fn holders<'py>(&self, keys: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let py = keys.py();
        let mut seen = (NO_HOLDER, mask(py, &[])?);
        let found = PyList::empty(py);
        for key in numbers(keys)? {
            let set = self.set_of(key);
            if set != seen.0 {
                seen = (set, mask(py, self.sets.words(set))?);
            }
            found.append(&seen.1)?;
        }
        Ok(found)
    }

    #[pyo3(signature = (slot, /))]
    fn keys<'py>(&self, py: Python<'py>, slot: usize) -> PyResult<Bound<'py, PySet>> {
        let found = PySet::empty(py)?;
        for entry in self.shards.iter().flat_map(|shard| &shard.entries) {
            if self.sets.has(entry.set, slot) {
                found.add(entry.key)?;
            }
        }
        Ok(found)
    }

    #[pyo3(signature = (keys, wanted, width, /))]
    fn leading<'py>(
        &self,
        keys: &Bound<'py, PyAny>,
        wanted: &Bound<'py, PyInt>,
        width: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut overlap = vec![0; width];
        self.leading_of(&numbers(keys)?, bits(wanted, width)?, &mut overlap);
        PyList::new(keys.py(), overlap)
    }

    #[pyo3(signature = (slots, width, /))]
    fn begin_wipe(&mut self, slots: &Bound<'_, PyInt>, width: usize) -> PyResult<()> {
        (self.wiped, self.next) = (bits(slots, width)?, 0);
        Ok(())
    }

    #[pyo3(signature = (budget, /))]
    fn wipe(&mut self, budget: usize) -> bool {
        let (mut visited, mut known) = (0, HashMap::new());
        while self.next < SHARDS && visited < budget {
            let shard = &mut self.shards[self.next];
            visited += shard.used;
            self.next += 1;
            let mut emptied = false;
            for entry in &mut shard.entries {
                let have = entry.set;
                let mut words = self.sets.words(have).iter().zip(&self.wiped);
                if words.any(|(word, gone)| word & gone != 0) {
                    let rest = *known
                        .entry(have)
                        .or_insert_with(|| self.sets.without(have, &self.wiped));
                    self.sets.replace(have, rest);
                    entry.set = rest;
                    emptied |= rest == NO_HOLDER;
                }
            }
            if emptied {
                shard.rebuild();
            }
        }
        self.next < SHARDS
    }
}

/// Return keys as numbers: a buffer is copied at once. Raises as an iteration does, and `OverflowError`.
fn numbers(keys: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    match PyBuffer::get(keys) {
        Ok(buffer) => buffer.to_vec(keys.py()),
        Err(_) => keys.try_iter()?.map(|key| key?.extract()).collect(),
    }
}

/// Return an integer's lower bits as words, `width` bits at least. Raises `OverflowError` for more.
fn bits(mask: &Bound<'_, PyInt>, width: usize) -> PyResult<Vec<u64>> {
    let raw = mask.call_method1("to_bytes", (8 * width.div_ceil(64), "little"))?;
    let words = raw.cast::<PyBytes>()?.as_bytes().chunks_exact(8);
    Ok(words
        .map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")))
        .collect())
}

fn mask<'py>(py: Python<'py>, words: &[u64]) -> PyResult<Bound<'py, PyAny>> {
    let raw: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    py.get_type::<PyInt>()
        .call_method1("from_bytes", (PyBytes::new(py, &raw), "little"))
}

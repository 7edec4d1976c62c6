//! Compiled forms of two loops of mmrouter. Each answers `None` to whatever it does not expect, and then the Python form
//! does the work, raises the error and is the only place that says what an error is.

mod keys;
mod payload;

use pyo3::prelude::*;

/// What these functions take and return, as a number: `mmrouter/mmrouter_lib/native.py` uses no module of another one.
/// A change of what they do with the same arguments is a new number, too.
const REVISION: u32 = 1;

#[pymodule]
fn mmrouter_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("REVISION", REVISION)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(keys::chain, module)?)?;
    module.add_function(wrap_pyfunction!(payload::pack_token_ids, module)?)
}

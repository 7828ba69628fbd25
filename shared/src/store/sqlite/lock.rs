//! One process per database: a locked file beside it says so.

use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use super::OpenError;

/// The lock; the system lets go of it when the process ends, however it ends.
pub(super) struct Lock {
    /// Never read again: holding it is its use.
    _file: File,
}

impl Lock {
    /// Takes the database `path`.
    pub(super) fn take(path: &Path) -> Result<Self, OpenError> {
        let unusable = |source| OpenError::Lock { path: path.to_owned(), source };
        let beside = PathBuf::from(format!("{}.lock", path.display()));
        let options = File::options().read(true).write(true).create(true).truncate(false).open(&beside);
        let mut file = options.map_err(unusable)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let holder = file.read_to_string(&mut holder).is_ok().then(|| holder.trim().to_owned());
                return Err(OpenError::InUse { path: path.to_owned(), holder: holder.filter(|pid| !pid.is_empty()) });
            }
            Err(TryLockError::Error(source)) => return Err(unusable(source)),
        }
        file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(unusable)?;
        Ok(Self { _file: file })
    }
}

/// A folder that is removed when it is dropped.
pub(super) struct Temporary(PathBuf);

impl Temporary {
    /// A new folder among the system's temporary files.
    pub(super) fn create() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("threadgate-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // What cannot be removed is left to whoever cleans the temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

//! Launches written to a file, which `simt/tests/replay.cpp` runs in another process under a sanitizer.

use std::io::{self, Write};

use crate::Buffer;
use crate::launch::{Kind, Launch, bytes_of};

impl Launch<'_> {
    /// Writes the launch and the contents of its buffers in the format described at the top of `simt/tests/replay.cpp`. A replay
    /// runs it once for each of `seeds`. A file may contain several launches, one after the other.
    ///
    /// # Errors
    /// Errors of the writer, and [`io::ErrorKind::Unsupported`] for a buffer that the CPU cannot read.
    pub fn record(&self, seeds: &[u64], out: &mut impl Write) -> io::Result<()> {
        let mut buffers: Vec<&Buffer> = Vec::new();
        for (_, buffer) in self.buffers() {
            if !buffers.iter().any(|known| std::ptr::eq(*known, buffer)) {
                buffers.push(buffer);
            }
        }
        count(out, self.kernel.len())?;
        out.write_all(self.kernel.as_bytes())?;
        for number in self.grid.iter().chain(&self.block).chain([&self.shared_bytes]) {
            out.write_all(&number.to_le_bytes())?;
        }
        count(out, seeds.len())?;
        for seed in seeds {
            out.write_all(&seed.to_le_bytes())?;
        }
        count(out, buffers.len())?;
        for buffer in &buffers {
            let bytes = buffer.contents().map_err(|error| io::Error::new(io::ErrorKind::Unsupported, error))?;
            out.write_all(&(bytes.len() as u64).to_le_bytes())?;
            out.write_all(&bytes)?;
        }
        let number_of =
            |buffer: &Buffer| buffers.iter().position(|known| std::ptr::eq(*known, buffer)).unwrap_or_default();
        count(out, self.args.len())?;
        for arg in self.args {
            let value = match &arg.0 {
                Kind::Bytes(bytes) => bytes,
                Kind::Number(bytes, len) => &bytes[..*len],
                Kind::Pointer { buffer, offset } => {
                    count(out, 1)?;
                    count(out, number_of(buffer))?;
                    out.write_all(&(*offset as u64).to_le_bytes())?;
                    continue;
                }
                Kind::Tensor(tensor) => {
                    count(out, 2)?;
                    count(out, number_of(tensor.buffer))?;
                    out.write_all(&bytes_of(&tensor.host_map(0)))?;
                    continue;
                }
            };
            count(out, 0)?;
            count(out, value.len())?;
            out.write_all(value)?;
        }
        Ok(())
    }
}

fn count(out: &mut impl Write, number: usize) -> io::Result<()> {
    let number = u32::try_from(number).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    out.write_all(&number.to_le_bytes())
}

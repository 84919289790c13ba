//! Tile registers of Intel AMX: detection, permission, configuration of a thread, and the instructions behind [`Registers`].
//!
//! Stable Rust has neither intrinsics nor target features for AMX, so the instructions are inline assembly.
//!
//! **Costs.** Configuration and release take about 200 cycles together. While tiles are configured, a switch of threads saves 8 KiB
//! more, so a task releases them at its end; other threads pay nothing.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::trial::{self, NUM_KINDS, Random};
use super::{BYTES, ByteLines, ByteRows, Emulated, LANES, Registers, Tile};
use crate::Pairs;

/// What the CPU and the operating system say about tiles. It is a value, so that tests can make up a hypervisor.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// CPUID 1 ECX: bit 27 is OSXSAVE, without which XGETBV is illegal.
    pub leaf1_ecx: u32,
    /// CPUID 7 EDX: bit 22 is bf16, bit 24 tiles, bit 25 int8.
    pub leaf7_edx: u32,
    /// CPUID 13 EAX: states that XCR0 may enable.
    pub states: u32,
    /// CPUID 13/18 EAX: bytes of tile data in an XSAVE area.
    pub tile_bytes: u32,
    /// CPUID 29/1 EBX (bytes per row, number of tiles) and ECX (rows).
    pub palette: [u32; 2],
    /// XCR0: states that the operating system has enabled.
    pub xcr0: u64,
}

/// Bits 17 (tile configuration) and 18 (tile data) of XCR0.
const TILE_STATES: u64 = 3 << 17;

/// Bits 22, 24 and 25 of CPUID 7 EDX.
const FEATURES: u32 = 1 << 22 | 1 << 24 | 1 << 25;

/// Bit 27 of CPUID 1 ECX.
const OSXSAVE: u32 = 1 << 27;

impl Probe {
    /// Asks this CPU.
    pub fn read() -> Probe {
        let leaves = __cpuid(0).eax;
        let leaf = |leaf: u32, sub| (leaf <= leaves).then(|| __cpuid_count(leaf, sub));
        let (leaf1_ecx, mut low, mut high) = (__cpuid(1).ecx, 0u32, 0u32);
        if leaf1_ecx & OSXSAVE != 0 {
            // SAFETY: OSXSAVE says that the instruction is legal. It reads a register.
            unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack)) };
        }
        Probe {
            leaf1_ecx,
            leaf7_edx: leaf(7, 0).map_or(0, |it| it.edx),
            states: leaf(13, 0).map_or(0, |it| it.eax),
            tile_bytes: leaf(13, 18).map_or(0, |it| it.eax),
            palette: leaf(29, 1).map_or([0; 2], |it| [it.ebx, it.ecx]),
            xcr0: u64::from(high) << 32 | u64::from(low),
        }
    }

    /// Returns why tiles cannot be used; `None` if they can.
    pub fn missing(&self) -> Option<&'static str> {
        let [ebx, ecx] = self.palette;
        if self.leaf7_edx & FEATURES != FEATURES {
            Some("this CPU has no AMX tiles in bfloat16 and int8")
        } else if self.leaf1_ecx & OSXSAVE == 0 || self.xcr0 & TILE_STATES != TILE_STATES {
            Some("the operating system or hypervisor does not enable AMX tiles (XCR0 bits 17 and 18)")
        } else if u64::from(self.states) & TILE_STATES != TILE_STATES || self.tile_bytes < 8192 {
            Some("the hypervisor hides the state of AMX tiles (CPUID leaf 13)")
        } else if ebx & 0xffff != 64 || ebx >> 16 < 8 || ecx & 0xffff < 16 {
            Some("this CPU has no 8 AMX tiles of 16 rows of 64 bytes (CPUID leaf 29)")
        } else {
            None
        }
    }
}

/// Proof that this process may use tiles.
#[derive(Clone, Copy, Debug)]
pub struct Amx(());

impl Amx {
    /// Asks the CPU, and once per process the kernel for permission; then compares the instructions with their definition.
    ///
    /// # Errors
    /// Why tiles cannot be used, as one sentence.
    pub fn get() -> Result<Amx, &'static str> {
        static AMX: OnceLock<Result<Amx, &'static str>> = OnceLock::new();
        *AMX.get_or_init(|| {
            if let Some(why) = Probe::read().missing() {
                return Err(why);
            }
            permit()?;
            let (random, amx) = (&mut Random(1), Amx(()));
            let differs = |kind| {
                let tiles = trial::operands(random, kind);
                let [got, want] = [
                    trial::product(&mut Hardware::<64>::configure(amx, LANES), &tiles),
                    trial::product(&mut Emulated::<64>::new(LANES), &tiles),
                ];
                trial::differences(&got, &want) > 0
            };
            let bytes = trial::byte_operands(&mut Random(2));
            let [got, want] = [
                trial::byte_product(&mut Hardware::<32>::configure(amx, LANES), &bytes),
                trial::byte_product(&mut Emulated::<32>::new(LANES), &bytes),
            ];
            match got != want || (0..2 * NUM_KINDS).map(|i| i % NUM_KINDS).any(differs) {
                true => Err("the AMX tiles of this CPU compute other bits than Quire defines"),
                false => Ok(amx),
            }
        })
    }
}

/// Asks Linux to let all threads of this process use tile data.
fn permit() -> Result<(), &'static str> {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XTILEDATA: libc::c_long = 18;
    // SAFETY: changes only what the process may do.
    if unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) } == 0 {
        return Ok(());
    }
    Err(match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::ENOSPC) => {
            "Linux refuses AMX tiles: the alternate signal stack of a thread is too small for their state"
        }
        Some(libc::EPERM) => "Linux refuses AMX tiles: a seccomp filter forbids arch_prctl",
        _ => "Linux refuses AMX tiles: it is older than 5.16, or they are switched off",
    })
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

thread_local! {
    /// Whether this thread's tiles are configured.
    static CONFIGURED: Cell<bool> = const { Cell::new(false) };
}

/// The configured tile registers of the calling thread. Dropping them releases the state.
pub struct Hardware<const WIDTH: usize> {
    /// Not `Send`: registers belong to a thread.
    thread: PhantomData<*const ()>,
}

impl<const WIDTH: usize> Hardware<WIDTH> {
    /// Configures the thread's tiles, and sets them to zero. Sums and A tiles get this number of rows, which is all that saves time.
    /// Rows of A tiles have WIDTH bytes: 64 or 32.
    ///
    /// # Panics
    /// If the number is not in 1..=16, or the thread has configured tiles already.
    #[inline(always)]
    pub fn configure(_: Amx, rows: usize) -> Self {
        const { assert!(WIDTH == 64 || WIDTH == 32, "bytes of a row") };
        assert!((1..=LANES).contains(&rows), "{rows} rows of a tile");
        assert!(!CONFIGURED.replace(true), "this thread uses tiles already");
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        config.bytes[..8].fill(size_of::<Pairs>() as u16);
        config.rows[..6].fill(rows as u8);
        config.bytes[4..6].fill(WIDTH as u16);
        config.rows[6..8].fill((WIDTH / 4) as u8);
        // SAFETY: the CPU and the kernel allow it (`Amx`), and the configuration is valid. The block may read memory, so all stores
        // to the configuration happen before it.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags, readonly)) };
        Hardware { thread: PhantomData }
    }
}

impl<const WIDTH: usize> Drop for Hardware<WIDTH> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: returns the tiles to their initial state.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
        CONFIGURED.set(false);
    }
}

/// Distance of the rows of a tile in memory.
const STRIDE: usize = size_of::<Pairs>();

impl<const WIDTH: usize> Registers for Hardware<WIDTH> {
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        // SAFETY: changes a tile register only.
        unsafe { asm!("tilezero tmm{}", const T, options(nostack, nomem, preserves_flags)) };
    }
    #[inline(always)]
    fn load<const T: usize>(&mut self, from: &Tile) {
        // SAFETY: no register has more than 16 rows of 64 bytes.
        unsafe {
            asm!("tileloadd tmm{}, [{} + {}]", const T, in(reg) from, in(reg) STRIDE,
                options(nostack, readonly, preserves_flags));
        }
    }
    #[inline(always)]
    fn stream<const T: usize>(&mut self, from: &Tile) {
        // SAFETY: as above.
        unsafe {
            asm!("tileloaddt1 tmm{}, [{} + {}]", const T, in(reg) from, in(reg) STRIDE,
                options(nostack, readonly, preserves_flags));
        }
    }
    #[inline(always)]
    fn store<const T: usize>(&mut self, to: &mut Tile) {
        // SAFETY: as above, and every bit pattern is a valid line.
        unsafe {
            asm!("tilestored [{} + {}], tmm{}", in(reg) to, in(reg) STRIDE, const T, options(nostack, preserves_flags));
        }
    }
    #[inline(always)]
    fn add_products<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: changes a tile register only. `configure` gives C and A equally many rows.
        unsafe {
            asm!("tdpbf16ps tmm{}, tmm{}, tmm{}", const C, const A, const B, options(nostack, nomem, preserves_flags));
        }
    }
    #[inline(always)]
    fn load_rows<const T: usize>(&mut self, from: &ByteRows) {
        const { assert!(4 <= T && T < 6 && WIDTH <= BYTES, "an A tile of bytes") };
        // SAFETY: at most 16 rows of 32 bytes.
        unsafe {
            asm!("tileloadd tmm{}, [{} + {}]", const T, in(reg) from, in(reg) BYTES,
                options(nostack, readonly, preserves_flags));
        }
    }
    #[inline(always)]
    fn load_lines<const T: usize>(&mut self, from: &ByteLines) {
        const { assert!(6 <= T && T < 8 && WIDTH <= BYTES, "a B tile of bytes") };
        // SAFETY: 8 lines of 64 bytes.
        unsafe {
            asm!("tileloadd tmm{}, [{} + {}]", const T, in(reg) from, in(reg) STRIDE,
                options(nostack, readonly, preserves_flags));
        }
    }
    #[inline(always)]
    fn add_byte_products<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: as for `add_products`.
        unsafe {
            asm!("tdpbssd tmm{}, tmm{}, tmm{}", const C, const A, const B, options(nostack, nomem, preserves_flags));
        }
    }
}

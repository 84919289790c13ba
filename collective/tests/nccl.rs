//! The `nccl` carrier, over an NCCL and a driver in host code (`backends/nccl.cpp`) that [`driver`](crate::backends) starts this program
//! with. Without them only what is missing can be tested.

use std::sync::{Arc, Barrier};

use collective::{Collective, CollectiveError, nccl, single};
use device::{Device, DeviceError, Dtype};

use super::on_ranks_of;
use crate::backends::{Fake, is_fake};

/// One rank of a group over NCCL.
struct Rank<'a> {
    group: Arc<dyn Collective>,
    device: Arc<dyn Device>,
    barrier: &'a Barrier,
}

/// Runs `work` on every rank of a group of threads, each with a device and the group over NCCL.
fn on_gpus<T: Send>(size: usize, scratch: usize, work: impl Fn(&Rank<'_>) -> T + Sync) -> Vec<T> {
    let barrier = &Barrier::new(size);
    on_ranks_of(size, |control| {
        let device = device::open("cuda", Some(1)).unwrap();
        let group = nccl(Arc::clone(control), &device, scratch).unwrap();
        assert_eq!((group.carrier(), group.rank(), group.size()), ("nccl", control.rank(), size));
        let rank = Rank { group, device, barrier };
        let result = work(&rank);
        // All ranks are done before the first releases memory.
        barrier.wait();
        result
    })
}

impl Rank<'_> {
    /// Drops something with memory while no rank has work: the fake driver does not know which memory work uses.
    fn release<T>(&self, value: T) {
        self.barrier.wait();
        drop(value);
        self.barrier.wait();
    }

    /// Gathers the columns of a matrix that all ranks know.
    fn gather(&self, group: &dyn Collective, widths: &[usize], rows: usize) {
        let (device, part) = (&*self.device, widths[group.rank()]);
        let width: usize = widths.iter().sum();
        let whole: Vec<u8> = (0..rows * width).map(|at| (at * 7 % 251) as u8).collect();
        let before: usize = widths[..group.rank()].iter().sum();
        let rows_of = (0..rows).flat_map(|row| whole[row * width + before..][..part].to_vec()).collect::<Vec<u8>>();
        let [mut own, mut all] = [rows * part + 8, rows * width + 8].map(|bytes| device.alloc(bytes).unwrap());
        device.upload(&mut own, 0, &rows_of).unwrap();
        group.all_gather_on(device, &own, rows, widths, &mut all).unwrap();
        let mut found = vec![0xff; rows * width + 8];
        device.download(&all, 0, &mut found).unwrap();
        // What is behind the rows stays as it was.
        assert!(found[..rows * width] == whole && found[rows * width..] == [0; 8], "widths {widths:?}, {rows} rows");
        self.release((own, all));
    }
}

#[test]
#[ignore = "only over a fake driver"]
fn rows_of_gpus_are_gathered_in_pieces_that_fit_and_numbers_are_added() {
    // Scratch memory of 64 bytes: some gathers need several pieces, some rows do not fit at all.
    on_gpus(3, 64, |rank| {
        let (group, device) = (&*rank.group, &*rank.device);
        for (widths, rows) in [
            (vec![4; 3], 1),
            (vec![4; 3], 5),
            (vec![4; 3], 13),
            (vec![1, 0, 5], 1),
            (vec![1, 0, 5], 21),
            (vec![40; 3], 3),
        ] {
            rank.gather(group, &widths, rows);
        }
        rank.gather(group, &[0; 3], 2);
        rank.gather(group, &[3; 3], 0);
        let mut values = device.alloc(12).unwrap();
        device.upload(&mut values, 0, device::bytes_of(&[1.5f32, group.rank() as f32, 7.0])).unwrap();
        group.sum_on(device, Dtype::F32, &mut values, 2).unwrap();
        let mut sums = [0; 12];
        device.download(&values, 0, &mut sums).unwrap();
        assert_eq!(sums, device::bytes_of(&[4.5f32, 3.0, 7.0]));
        rank.release(values);
        // Bytes of the host are those of the control group.
        assert_eq!(group.values(group.rank() as u64).unwrap(), [0, 1, 2]);
        super::suite::gather(group, &[1, 2, 3], 4);
    });
}

#[test]
#[ignore = "only over a fake driver"]
fn groups_of_gpus_are_split_and_end() {
    let errors = on_gpus(4, 64, |rank| {
        let (group, device) = (&*rank.group, &*rank.device);
        let half = group.split(group.rank() / 2).unwrap();
        assert_eq!((half.carrier(), half.size()), ("nccl", 2));
        rank.gather(&*half, &[2, 3], 4);
        rank.release(half);
        let mut own = device.alloc(4).unwrap();
        rank.barrier.wait();
        if group.rank() == 0 {
            group.abort("a test");
        }
        while group.min(0).is_ok() {}
        group.abort("a test");
        let error = group.sum_on(device, Dtype::F32, &mut own, 1).unwrap_err().to_string();
        rank.release(own);
        error
    });
    errors.iter().for_each(|error| assert_eq!(error, "the group of ranks was ended: NCCL was stopped"));
}

#[test]
#[ignore = "only over a fake driver"]
fn wrong_memory_of_gpus_is_an_error_of_this_rank_alone() {
    on_gpus(2, 64, |rank| {
        let (group, device) = (&*rank.group, &*rank.device);
        let (mut own, host) = (device.alloc(8).unwrap(), device::open("cpu", Some(1)).unwrap());
        let mut all = device.alloc(16).unwrap();
        let outside = |outcome| matches!(outcome, Err(CollectiveError::Device(DeviceError::Outside { .. })));
        assert!(outside(group.all_gather_on(device, &own, 3, &[4, 4], &mut all)));
        assert!(outside(group.all_gather_on(device, &own, 2, &[4, 5], &mut all)));
        assert!(outside(group.sum_on(device, Dtype::F32, &mut own, 3)));
        let wrong = group.all_gather_on(device, &own, 2, &[4], &mut all);
        assert!(matches!(wrong, Err(CollectiveError::Size { found: 1, expected: 2, .. })));
        let foreign = host.alloc(8).unwrap();
        let wrong = group.all_gather_on(device, &foreign, 2, &[4, 4], &mut all);
        assert!(matches!(wrong, Err(CollectiveError::Device(DeviceError::WrongDevice { .. }))));
        rank.release((own, all));
        rank.gather(group, &[4, 4], 2);
    });
}

/// Prints what the library says, for a test of the driver that makes every exchange fail.
#[test]
#[ignore = "only as a program of its own, over a fake driver"]
fn an_exchange_that_has_failed() {
    let device = device::open("cuda", Some(1)).unwrap();
    let mut values = device.alloc(4).unwrap();
    let outcome = nccl(single(), &device, 64).and_then(|group| group.sum_on(&*device, Dtype::F32, &mut values, 1));
    println!("{}", outcome.map_or_else(|error| error.to_string(), |()| "added".into()));
}

#[test]
fn a_rank_without_a_gpu_or_without_nccl_is_one_line_on_every_rank() {
    let line = |outcome: Result<Arc<dyn Collective>, CollectiveError>| outcome.err().unwrap().to_string();
    let cpu = device::open("cpu", Some(1)).unwrap();
    assert_eq!(line(nccl(single(), &cpu, 64)), "NCCL needs --device cuda, found --device cpu");
    // Every rank learns that one cannot, and the control group goes on.
    let lines = on_ranks_of(2, |control| {
        let line = line(nccl(Arc::clone(control), &cpu, 64));
        assert_eq!(control.min(1).unwrap(), 1);
        line
    });
    assert_eq!(lines[0], lines[1]);
    if is_fake() {
        let gpu = device::open("cuda", Some(1)).unwrap();
        let lines = on_ranks_of(2, |control| line(nccl(Arc::clone(control), [&gpu, &cpu][control.rank()], 64)));
        assert_eq!(
            lines,
            ["another rank cannot use NCCL; its message says why", "NCCL needs --device cuda, found --device cpu"]
        );
    }
}

#[test]
fn memory_of_gpus_is_exchanged_by_an_nccl_of_host_code() {
    if is_fake() {
        return;
    }
    let Some(fake) = Fake::get() else { return };
    let output =
        fake.run("nccl::", &["--skip", "an_exchange_that_has_failed", "--skip", "memory_of_gpus_is_exchanged"], &[]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("4 passed"), "{said}");
    for (variables, words) in [
        (
            ("FAKE_NCCL_ERROR", "1"),
            "NCCL: an earlier exchange: unhandled cuda error, a text of the library; NCCL_DEBUG=INFO prints",
        ),
        (("QUIRE_NCCL_SO_PATH", "/nonexistent/nccl"), "found no NCCL (/nonexistent/nccl: "),
        (
            ("QUIRE_NCCL_SO_PATH", "libcuda.so.1"),
            "libcuda.so.1: found no ncclGetUniqueId, expected NCCL 2.13 or newer; name",
        ),
    ] {
        let output = fake.run("nccl::an_exchange_that_has_failed", &["--exact"], &[variables]);
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(words), "{variables:?}: {said}");
    }
}

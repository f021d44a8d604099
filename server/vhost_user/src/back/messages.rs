//! What a transport's messages do to a device server.

use std::{fs::File, io, os::fd::OwnedFd, sync::Arc};

use ram::{ForeignRange, Ram, RamError};
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
};
use vhost::vhost_user::{
    Error as Refusal, GpuBackend, Result as Answer, VhostUserBackendReqHandlerMut,
    VhostUserProtocolFeatures, VhostUserVirtioFeatures,
    message::{
        VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags,
        VhostUserInflight, VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig,
        VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags,
        VhostUserVringState,
    },
};

use super::*;

/// An event that never has us wait: whoever is at its other end may let it be full, or empty.
fn patient(file: Option<File>) -> Answer<Option<File>> {
    let host = |error: Errno| Refusal::ReqHandlerError(error.into());
    if let Some(file) = &file {
        let flags = fcntl_getfl(file).map_err(host)?;
        fcntl_setfl(file, flags | OFlags::NONBLOCK).map_err(host)?;
    }
    Ok(file)
}

/// Where the guest has what the monitor has at `address`.
fn translate(regions: &[VhostUserMemoryRegion], address: u64) -> Answer<u64> {
    let place = |region: &VhostUserMemoryRegion| {
        let offset = address.checked_sub(region.user_addr)?;
        (offset < region.memory_size).then(|| region.guest_phys_addr.wrapping_add(offset))
    };
    regions.iter().find_map(place).ok_or(Refusal::InvalidParam)
}

/// The guest's memory of this table.
fn memory(regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Answer<Memory> {
    let host = |error: RamError| Refusal::ReqHandlerError(io::Error::other(error));
    if regions.iter().any(|region| region.guest_phys_addr == MARKS) {
        let [memory, marks, notes] = [0, MARKS, NOTES].map(|at| region(regions, &files, at));
        return Ram::of_another(memory?, marks?, notes?).map(Memory::Ours).map_err(host);
    }
    let ranges = regions.iter().zip(files).map(|(region, file)| ForeignRange {
        gpa: region.guest_phys_addr,
        len: region.memory_size,
        file: file.into(),
        offset: region.mmap_offset,
    });
    ram::foreign(ranges.collect()).map(Memory::Foreign).map_err(host)
}

/// The words that our monitor shares.
fn words(regions: &[VhostUserMemoryRegion], files: &[File]) -> Answer<Option<Arc<Words>>> {
    let said = regions.iter().find(|region| region.guest_phys_addr == WORDS);
    let Some(said) = said else { return Ok(None) };
    let words = Words::of_another(region(regions, files, WORDS)?.into(), said.mmap_offset);
    Ok(Some(Arc::new(words.map_err(Refusal::ReqHandlerError)?)))
}

/// The log of requests that our monitor shares.
fn log(regions: &[VhostUserMemoryRegion], files: &[File]) -> Answer<Option<Arc<RequestLog>>> {
    if !regions.iter().any(|region| region.guest_phys_addr == LOG) {
        return Ok(None);
    }
    let log = RequestLog::of_another(region(regions, files, LOG)?);
    Ok(Some(Arc::new(log.map_err(Refusal::ReqHandlerError)?)))
}

/// The memory region that begins at `at`, out of those the monitor sent.
fn region(regions: &[VhostUserMemoryRegion], files: &[File], at: u64) -> Answer<OwnedFd> {
    let found = regions.iter().position(|region| region.guest_phys_addr == at);
    let file = found.and_then(|index| files.get(index)).ok_or(Refusal::InvalidParam)?;
    let file = file.try_clone().map_err(Refusal::ReqHandlerError)?;
    Ok(file.into())
}

impl VhostUserBackendReqHandlerMut for DeviceServer {
    fn set_owner(&mut self) -> Answer<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Answer<()> {
        Ok(())
    }

    fn reset_device(&mut self) -> Answer<()> {
        self.rings.iter_mut().for_each(|ring| *ring = ServedRing::default());
        self.device.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Answer<u64> {
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        Ok(self.device.features() | RING_FEATURES | protocol)
    }

    fn set_features(&mut self, features: u64) -> Answer<()> {
        self.features = features;
        self.device.negotiated(features & !VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits());
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Answer<Option<Vec<u64>>> {
        self.words = words(regions, &files)?;
        self.log = log(regions, &files)?;
        self.memory = Some(memory(regions, files)?);
        self.regions = regions.to_vec();
        // Queues that run go on in the new table's memory.
        for index in 0..self.rings.len() {
            self.rings[index].stop();
            self.start(index)?;
        }
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Answer<()> {
        self.ring(index)?.shape.size = u16::try_from(num).map_err(|_| Refusal::InvalidParam)?;
        Ok(())
    }

    /// Addresses are the monitor's own; our monitor's are GPAs.
    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Answer<()> {
        let [descriptors, used, available] =
            [descriptors, used, available].map(|at| translate(&self.regions, at));
        let (descriptors, used, available) = (descriptors?, used?, available?);
        let shape = &mut self.ring(index)?.shape;
        *shape = Shape { size: shape.size, descriptors, available, used };
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Answer<()> {
        self.ring(index)?.base = base as u16;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Answer<VhostUserVringState> {
        let ring = self.ring(index)?;
        ring.stop();
        (ring.kick, ring.enabled) = (None, false);
        Ok(VhostUserVringState::new(index, ring.base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Answer<()> {
        self.ring(index)?.kick = patient(file)?;
        self.start(index.into())
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Answer<()> {
        let file = patient(file)?;
        let call = &self.ring(index)?.call;
        let before = std::mem::replace(&mut *lock(call), file);
        // What was said to the one before may not have been heard.
        before.iter().for_each(|_| signal(call));
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Answer<()> {
        self.ring(index)?.error = patient(file)?;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Answer<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::MQ)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Answer<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Answer<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Answer<()> {
        let ring = self.ring(index)?;
        ring.enabled = enable;
        if enable {
            return self.start(index as usize);
        }
        ring.stop();
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Answer<Vec<u8>> {
        // Another program may know of fields that the device has not.
        let fields = self.device.config().into_iter().chain(iter::repeat(0));
        Ok(fields.skip(offset as usize).take(size as usize).collect())
    }

    fn set_config(&mut self, offset: u32, data: &[u8], _flags: VhostUserConfigFlags) -> Answer<()> {
        self.device.config_write(offset as usize, data);
        Ok(())
    }

    // What is below was not offered.

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Answer<()> {
        Err(Refusal::InvalidOperation("there is no display"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Answer<File> {
        Err(Refusal::InvalidOperation("there are no shared objects"))
    }

    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Answer<(VhostUserInflight, File)> {
        Err(Refusal::InvalidOperation("requests are given back in order"))
    }

    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Answer<()> {
        Err(Refusal::InvalidOperation("requests are given back in order"))
    }

    fn get_max_mem_slots(&mut self) -> Answer<u64> {
        Err(Refusal::InvalidOperation("memory does not change"))
    }

    fn add_mem_region(
        &mut self,
        _: &VhostUserSingleMemoryRegion,
        _: File,
        _: Option<bool>,
    ) -> Answer<Option<u64>> {
        Err(Refusal::InvalidOperation("memory does not change"))
    }

    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Answer<()> {
        Err(Refusal::InvalidOperation("memory does not change"))
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Answer<Option<File>> {
        Err(Refusal::InvalidOperation("there is no migration"))
    }

    fn check_device_state(&mut self) -> Answer<()> {
        Err(Refusal::InvalidOperation("there is no migration"))
    }

    fn get_shmem_config(&mut self) -> Answer<VhostUserShMemConfig> {
        Err(Refusal::InvalidOperation("there is no shared memory"))
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Answer<()> {
        Err(Refusal::InvalidOperation("there is no migration"))
    }
}

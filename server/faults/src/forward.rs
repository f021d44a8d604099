//! What a filter around a device leaves to that device.

/// All of `VirtioDevice` but `config` and `process`, by the field `device`.
macro_rules! forward_rest {
    () => {
        fn device_type(&self) -> u16 {
            self.device.device_type()
        }

        fn class(&self) -> u32 {
            self.device.class()
        }

        fn features(&self) -> u64 {
            self.device.features()
        }

        fn queue_sizes(&self) -> &[u16] {
            self.device.queue_sizes()
        }

        fn config_write(&mut self, offset: usize, data: &[u8]) {
            self.device.config_write(offset, data);
        }

        fn negotiated(&mut self, features: u64) {
            self.device.negotiated(features);
        }

        fn take_due(&mut self) -> Option<usize> {
            self.device.take_due()
        }

        fn log_to(&mut self, log: &std::sync::Arc<virtio::RequestLog>) {
            self.device.log_to(log);
        }

        fn stop(&mut self, index: usize) {
            self.device.stop(index);
        }

        fn forget(&mut self, index: usize) {
            self.device.forget(index);
        }

        fn is_replaceable(&self) -> bool {
            self.device.is_replaceable()
        }

        fn is_patient(&self, index: usize) -> bool {
            self.device.is_patient(index)
        }

        fn telling(&mut self, index: usize) -> virtio::Telling {
            self.device.telling(index)
        }

        fn reset(&mut self) {
            self.device.reset();
        }
    };
}
pub(crate) use forward_rest;

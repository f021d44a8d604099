//! What the guest's agent is told, and says.

use guest_agent::protocol::{self, AgentRequest, Limit, MESSAGE};

use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "agent", seeds, run };

fn seeds() -> Vec<Vec<u8>> {
    let request = AgentRequest {
        arguments: vec![b"printf".to_vec(), b"a b\n".to_vec(), vec![0xff]],
        environment: vec![b"A=b=c".to_vec()],
        directory: b"/some where".to_vec(),
        user: 1000,
        groups: vec![1000, 27],
        shares: vec![(b"tag".to_vec(), b"/path".to_vec())],
        terminal: Some((24, 80)),
        limits: vec![Limit { resource: 7, current: 1024, maximum: u64::MAX }],
        network: true,
        ..AgentRequest::default()
    };
    vec![request.encode(), AgentRequest::default().encode()]
}

fn run(bytes: &[u8]) {
    if let Some(request) = AgentRequest::decode(bytes) {
        // What has been understood can be said again.
        assert!(AgentRequest::decode(&request.encode()).is_some());
    }
    for message in bytes.as_chunks::<MESSAGE>().0 {
        let (kind, number) = protocol::decode(*message);
        assert_eq!(protocol::encode(kind, number), *message);
    }
}

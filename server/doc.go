// Package server serves CRI: it validates a request, calls the engine or the
// image store and translates the answer. gRPC codes exist in this package only.
//
// # Services
//
// One object answers runtime.v1.RuntimeService and, under its former name,
// runtime.v1alpha2.RuntimeService; another does so for ImageService. The old
// messages are a subset of the new ones on the wire, so kubelets from 1.17 to
// 1.25 and current ones share a socket. grpc.health.v1.Health answers beside
// them. RPCs that crius does not have answer Unimplemented.
//
// # A call
//
// Every RPC, unary or streaming, passes through guard. From the inside out:
//
//   - the handler: validate (validate*.go), call ([Engine] or [Images]),
//     translate (convert.go);
//   - recover: a panic becomes an Internal error and a stack in the log, never
//     a dead daemon;
//   - faults: errors become status codes by the one table in faults.go;
//   - the log: one line per RPC with its subject, its duration and its error.
//
// # Promises
//
// A refusal names the field as the CRI proto spells it
// (config.mounts[2].container_path) and says what to do. Strings chosen by the
// kernel or an image are valid UTF-8 before they reach protobuf. No message
// exceeds Config.MaxMessageSize: streams are cut into chunks and the output of
// ExecSync is truncated to fit. Views are shared, not copied: nothing in this
// package writes to what [Engine] returns.
package server

// Package durable keeps an image store of containers/storage whole: across power cuts, crashes of
// this and of other processes, and beside other programs that use the store at the same time.
//
// containers/storage syncs the content of layers but not all of its records, and does not know
// after a power cut what has reached the disk. It waits for locks without limit, and leaves layers
// behind when its process dies. Three types make up for that:
//
//   - Manifest is a durable copy of the store's records: the content of every layer in it is on
//     the disk. When the store is opened, Restore replaces damaged record files, and Check, the
//     post-crash check, compares what the manifest does not list with its digests. Write makes a
//     new manifest after each pull.
//   - Leftovers keeps account of work in progress (Job), so that what unfinished work has made is
//     deleted, and nothing else.
//   - Locks reports who has the store locked, and waits with a limit.
//
// The order at a start is: Restore, open the library, Check, Leftovers.Recover, Begin.
// docs/decisions/0009-power-cuts.md has the reasons.
package durable

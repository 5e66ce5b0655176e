package network

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/crius-run/crius/internal/flock"
)

// dropLostLeases deletes the leases of the network in force that name no owner.
//
// host-local writes a lease, a file named by the address, without syncing it. A
// power cut may leave the file without its content, and then no DEL finds it:
// the address would never be released. host-local writes the owner before it
// releases its lock, so that such a file, seen under the lock, dates from
// before the cut.
func (n *Network) dropLostLeases(ctx context.Context) error {
	chosen, err := n.choose()
	if err != nil {
		return nil //nolint:nilerr // no network, no leases; Ready tells why
	}
	var errs []error
	for _, dir := range leaseDirs(chosen.list) {
		errs = append(errs, dropLost(ctx, dir))
	}
	return errors.Join(errs...)
}

// dropLost deletes the leases without an owner in a directory of host-local.
func dropLost(ctx context.Context, dir string) error {
	lost, err := lostLeases(dir)
	if err != nil || len(lost) == 0 {
		return err
	}
	lock, err := os.Open(filepath.Join(dir, "lock"))
	if errors.Is(err, fs.ErrNotExist) { // it never existed, or the power cut removed it
		lock, err = os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDONLY, 0o600)
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := flock.Try(lock); errors.Is(err, flock.ErrBusy) {
		return nil // a plugin is at work, and what is lost will be so at the next start
	} else if err != nil {
		return err
	}
	if lost, err = lostLeases(dir); err != nil {
		return err
	}
	var errs []error
	for _, path := range lost {
		slog.WarnContext(ctx, "released an IP address that belongs to no pod", "path", path)
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}

// lostLeases returns the leases in a directory whose content is missing.
func lostLeases(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var lost []string
	for _, e := range entries {
		if leaseAddress(e.Name()) == "" || !e.Type().IsRegular() {
			continue
		}
		path := filepath.Join(dir, e.Name())
		owner, _, err := readLease(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err == nil && owner == "" {
			lost = append(lost, path)
		}
	}
	return lost, nil
}

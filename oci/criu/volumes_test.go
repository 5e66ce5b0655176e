package criu

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/crius-run/crius/internal/fault"
)

// mountEntry is a message about a mount with that root.
func mountEntry(root string, flags ...protowire.Number) []byte {
	m := protowire.AppendTag(nil, 6, protowire.BytesType)
	m = protowire.AppendString(m, root)
	for _, number := range flags {
		m = protowire.AppendTag(m, number, protowire.VarintType)
		m = protowire.AppendVarint(m, 1)
	}
	return m
}

func mountsImage(messages ...[]byte) []byte {
	image := []byte("12345678")
	for _, m := range messages {
		image = append(binary.LittleEndian.AppendUint32(image, uint32(len(m))), m...)
	}
	return image
}

// A volume is no longer marked as deleted, a mount of the container's own still is, and everything else stays.
func TestReviveVolumes_criu_9(t *testing.T) {
	t.Parallel()
	byKey := protowire.AppendString(protowire.AppendTag(mountEntry("/a", mountDeleted), mountKey, protowire.BytesType), "/a")
	without := protowire.AppendString(protowire.AppendTag(mountEntry("/a"), mountKey, protowire.BytesType), "/a")
	own := mountEntry("/b", mountDeleted)
	was := mountsImage(mountEntry("/x", mountExternal, mountDeleted), byKey, own, mountEntry("/c", mountExternal))
	want := mountsImage(mountEntry("/x", mountExternal), without, own, mountEntry("/c", mountExternal))
	dir := t.TempDir()
	for name, image := range map[string][]byte{"mountpoints-12.img": was, "mountpoints-13.img": want, "inventory.img": was} {
		if err := os.WriteFile(filepath.Join(dir, name), image, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := ReviveVolumes(dir); err != nil {
		t.Fatal(err)
	}
	for name, image := range map[string][]byte{"mountpoints-12.img": want, "mountpoints-13.img": want, "inventory.img": was} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != string(image) {
			t.Errorf("%s is %q (%v), want %q", name, got, err, image)
		}
	}
}

func TestReviveVolumesOfDamagedImages(t *testing.T) {
	t.Parallel()
	for name, image := range map[string][]byte{
		"short header":  []byte("1234"),
		"short size":    []byte("12345678\x01"),
		"short message": []byte("12345678\x05\x00\x00\x00a"),
		"endless size":  []byte("12345678\xff\xff\xff\xff"),
		"no message":    mountsImage([]byte("\xff\xff")),
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "mountpoints-1.img"), image, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := ReviveVolumes(dir); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

package spec

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// maxAccountFile bounds an image's passwd and group file (CVE-2025-4437).
const maxAccountFile = 10 << 20

// ResolveUser determines the user of a container: the request's user and
// groups, else the image's, with names, primary group and supplementary groups
// from the passwd and group files below rootfs, never the node's. A missing
// file counts as empty.
func ResolveUser(rootfs string, sc *cri.LinuxContainerSecurityContext, imageUser string) (Identity, error) {
	passwd, err := readAccounts(rootfs, "/etc/passwd")
	if err != nil {
		return Identity{}, err
	}
	groups, err := readAccounts(rootfs, "/etc/group")
	if err != nil {
		return Identity{}, err
	}
	return identify(sc, imageUser, passwd, groups)
}

// AddAccount adds a line, from Identity.PasswdLine or Identity.GroupLine, to
// the /etc/passwd or /etc/group of a mounted root file system. It does nothing
// if the line is empty or the image has no such file.
func AddAccount(rootfs, name, line string) error {
	if line == "" {
		return nil
	}
	text, err := readAccounts(rootfs, name)
	if err != nil || text == "" {
		return err
	}
	if name, rest, _ := strings.Cut(line, ":"); strings.Contains("\n"+text, "\n"+name+":") {
		line = name + "_:" + rest // the name is another user's or group's
	}
	if !strings.HasSuffix(text, "\n") {
		line = "\n" + line
	}
	// The same file as before: nothing else runs in the container yet.
	fd, err := openBelow(rootfs, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	f, err := os.OpenFile("/proc/self/fd/"+strconv.Itoa(fd), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("the image's %s: %w", name, err)
	}
	_, err = f.WriteString(line)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("the image's %s: %w", name, err)
	}
	return nil
}

func readAccounts(rootfs, name string) (string, error) {
	data, err := ReadRootfsFile(rootfs, name, maxAccountFile)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(data), err
}

"""Mutants of swarm/auth."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="lock-brokers-key-forgotten-at-restart",
        breaks="A restarted broker forgets the new key that it has announced to members.",
        target="swarm.auth.broker_keys:BrokerKeys.__init__",
        old="successor = None if self._is_credential else load(self._next_path)",
        new="successor = None",
        caught_by="tests/unit/broker/test_locks.py::test_a_broker_that_is_started_again_goes_on_with_its_keys",
    ),
    Mutant(
        name="lock-proof-of-another-invitation",
        breaks="The proof of a key is valid for every invitation.",
        target="swarm.auth.key_proof:_message",
        old="return _PURPOSE + bytes.fromhex(invitation)",
        new="return _PURPOSE",
        caught_by="tests/unit/broker/test_locks.py::test_who_enrols_a_key_must_hold_it",
    ),
    Mutant(
        name="lock-brokers-key-is-a-members",
        breaks="The broker's own key can be registered for a member.",
        target="swarm.auth.registry:KeyRegistry._check_unused",
        old="if key in reserved:",
        new="if False:",
        caught_by="tests/unit/broker/test_locks.py::test_the_broker_s_own_keys_are_nobody_s",
    ),
    Mutant(
        name="lock-brokers-key-put-away-too-early",
        breaks="The broker retires its old key while members still depend on it.",
        target="swarm.auth.registry:KeyRegistry.members_without_key",
        old='members = [f"{each.name} ({each.role})" for each in self.members if each.broker not in (None, broker)]',
        new="members: list[str] = []",
        caught_by="tests/unit/broker/test_locks.py::test_the_old_key_is_answered_to_until_all_know_the_new_one",
    ),
    Mutant(
        name="lock-invited-shut-out",
        breaks="The broker retires its old key while invitations with it are valid.",
        target="swarm.auth.registry:KeyRegistry.members_without_key",
        old="return members + [",
        new="return members or [] and [",
        caught_by="tests/unit/broker/test_locks.py::test_invitations_are_good_for_as_long_as_their_key_is_answered_to",
    ),
    Mutant(
        name="lock-expired-invitation-enrols",
        breaks="An invitation that expires during the handshake still enrols a member.",
        target="swarm.auth.registry:KeyRegistry.enrol",
        old="if invited is None or now >= invited.expires_at:",
        new="if invited is None:",
        caught_by="tests/unit/auth/test_roll.py::test_an_invitation_expires",
    ),
    Mutant(
        name="lock-invitation-used-without-end",
        breaks="An invitation enrols more members than its number of uses.",
        target="swarm.auth.registry:KeyRegistry.enrol",
        old="left = msgspec.structs.replace(invited, uses=invited.uses - 1)",
        new="left = msgspec.structs.replace(invited, uses=invited.uses)",
        caught_by="tests/unit/auth/test_roll.py::test_an_invitation_lets_in_as_often_as_it_says",
    ),
    Mutant(
        name="lock-order-forgotten",
        breaks="A member that was offline is not asked to rotate its key when it returns.",
        target="swarm.auth.registry:KeyRegistry.must_rotate",
        old="return member is not None and member.must_rotate",
        new="return member is not None and False",
        caught_by="tests/unit/broker/test_locks.py::test_a_member_that_is_off_is_told_to_change_its_key_when_it_knocks",
    ),
    Mutant(
        name="lock-expired-invitation-opens",
        breaks="An expired invitation is accepted in the handshake.",
        target="swarm.auth.registry:KeyRegistry.role_of",
        old='return "invited" if invited is not None and now < invited.expires_at else None',
        new='return "invited" if invited is not None else None',
        caught_by="tests/unit/auth/test_roll.py::test_an_invitation_expires",
    ),
    Mutant(
        name="lock-revoked-key-announced",
        breaks="A revoked key can be announced as another member's next key.",
        target="swarm.auth.registry:KeyRegistry.rotate",
        old="self._check_unused(new, reserved)",
        new="""
            if new in self.keys or new in reserved:
                raise RegistryRefusal("this key is in use already: this is the broker's own key: make one of your own")
        """,
        caught_by="tests/unit/auth/test_roll.py::test_a_key_that_was_revoked_stays_so",
    ),
    Mutant(
        name="lock-brokers-key-lost-with-ones-own",
        breaks="A machine that rotates its own key forgets the broker's new key.",
        target="swarm.auth.rotation:CredentialStore.replace_secret",
        old="self.state_dir, self.membership, lambda found: msgspec.structs.replace(found, secret=secret, next=None)",
        new="self.state_dir, self.membership, lambda found: msgspec.structs.replace(self.membership, secret=secret, next=None)",
        caught_by="tests/unit/auth/test_rotation.py::test_the_brokers_new_key_is_kept_beside_ones_own",
    ),
    Mutant(
        name="named-address-of-who-is-gone",
        breaks="A worker without a connection may report any address.",
        target="swarm.auth.worker_address:address_error",
        old="if remote_address and named == _parse_address(remote_address):",
        new="if not remote_address or named == _parse_address(remote_address):",
        caught_by="tests/unit/auth/test_whereabouts.py::test_nowhere_else",
    ),
)
